"""The Ed25519 key of a node: one file, which gives the peer id and every signature.

The file is libp2p's own private-key record (``08 01 12 40``, 32 bytes of seed, 32 bytes of public
key), so the daemon and this node's signatures use the same file. The peer id of an Ed25519 key *is*
the public key (``00 24 08 01 12 20`` and 32 bytes, in base58), so a peer's signatures can be
checked by its peer id alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from shoal.swarm.errors import IdentityError
from shoal.swarm.file_lock import FileLock

KEY_HEADER = bytes.fromhex("08011240")
ID_HEADER = bytes.fromhex("002408011220")
KEY_BYTES = 32
"""Of a seed, and of a public key."""
KEY_FILE_BYTES = len(KEY_HEADER) + 2 * KEY_BYTES
ID_CHARS = 52
"""Of every Ed25519 peer id, in base58."""
SIGNATURE_BYTES = 64
SIGNATURE_PREFIX = b"shoal signature\x00"
"""The daemon signs its handshakes with the same key, so signatures of messages start with words
that no other protocol uses.
"""
NO_HARD_LINKS = (errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
"""Errors of a file system without them."""
ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


def b58encode(data: bytes) -> str:
    """Encode ``data`` in base58 (Bitcoin's alphabet); each leading zero byte becomes a ``1``."""
    zeros = len(data) - len(data.lstrip(b"\x00"))
    number = int.from_bytes(data, "big")
    digits = []
    while number:
        number, digit = divmod(number, 58)
        digits.append(ALPHABET[digit])
    return "1" * zeros + "".join(reversed(digits))


def b58decode(text: str) -> bytes:
    """Decode base58 ``text``. Quadratic in the length, so bound it first. Raises ValueError."""
    number = 0
    for char in text:
        number = number * 58 + ALPHABET.index(char)
    zeros = len(text) - len(text.lstrip("1"))
    return b"\x00" * zeros + number.to_bytes((number.bit_length() + 7) // 8, "big")


def public_key_of(peer_id: object) -> bytes | None:
    """Return the 32-byte public key inside an Ed25519 peer id, or None if that is not one.

    Never raises.
    """
    if not isinstance(peer_id, str) or len(peer_id) != ID_CHARS:
        return None
    try:
        raw = b58decode(peer_id)
    except ValueError:
        return None
    if len(raw) != len(ID_HEADER) + KEY_BYTES or not raw.startswith(ID_HEADER):
        return None
    return raw[len(ID_HEADER) :]


def is_peer_id(text: object) -> bool:
    return public_key_of(text) is not None


def verify(peer_id: str, context: str, data: bytes, signature: bytes) -> bool:
    """Return whether ``peer_id``'s key made ``signature`` over ``data`` in ``context``.

    Hostile input gives False.
    """
    key = public_key_of(peer_id)
    if key is None or not isinstance(signature, bytes) or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, _signed(context, data))
    except (InvalidSignature, ValueError):
        return False
    return True


def _signed(context: str, data: bytes) -> bytes:
    """Return the bytes to sign; the length before the context keeps (context, data) pairs apart."""
    name = context.encode()
    return SIGNATURE_PREFIX + len(name).to_bytes(2, "big") + name + data


class Identity:
    """A key pair.

    ``peer_id`` is base58, ``public_key`` 32 bytes, ``path`` the key file (None: in memory only).
    """

    def __init__(self, key: Ed25519PrivateKey, path: Path | None = None) -> None:
        self._key = key
        self.path = None if path is None else path.absolute()  # the process may change its folder
        self.public_key = key.public_key().public_bytes_raw()
        self.peer_id = b58encode(ID_HEADER + self.public_key)

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"  # never the key

    @classmethod
    def ephemeral(cls) -> Identity:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> Identity:
        """Make a new key in a new file.

        Raises IdentityError if the file exists or cannot be written.
        """
        return cls.ephemeral().write_to(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Identity:
        """Load the key in ``path``.

        Raises IdentityError if it is missing, damaged, or readable by group or others.
        """
        path = Path(path)
        blob = _read(path)
        seed = blob[len(KEY_HEADER) : -KEY_BYTES]
        public = blob[-KEY_BYTES:]
        if len(blob) == KEY_FILE_BYTES and blob.startswith(KEY_HEADER):
            identity = cls(Ed25519PrivateKey.from_private_bytes(seed), path)
            if identity.public_key == public:
                return identity
        raise IdentityError(
            f"The key file {path} is damaged or not an Ed25519 key: restore it from a backup, "
            "or move it away and run `shoal id new` for a new identity."
        )

    @classmethod
    def load_or_create(cls, path: str | os.PathLike[str]) -> Identity:
        """Load the key in ``path``, making it first if there is none.

        Raises IdentityError like ``load`` and ``create``.
        """
        if not os.path.lexists(path):
            try:
                return cls.create(path)
            except IdentityError:
                if not os.path.exists(path):
                    raise  # no other process made it at the same moment: it cannot be written
        return cls.load(path)

    def write_to(self, path: str | os.PathLike[str]) -> Identity:
        """Write this key to a new file (mode 0600, missing parents 0700) and return the identity
        with that path.

        Never overwrites. Raises IdentityError if the file exists or cannot be written.
        """
        path = Path(path)
        blob = KEY_HEADER + self._key.private_bytes_raw() + self.public_key
        scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            _make_private(path.parent)
            _write_new(scratch, blob)
            try:
                # The name appears with its whole content or not at all, and only if it is free.
                os.link(scratch, path)
            except OSError as error:
                if error.errno not in NO_HARD_LINKS:
                    raise
                _write_new(path, blob)
            finally:
                os.unlink(scratch)
            _sync_folder(path.parent)
        except FileExistsError as error:
            raise IdentityError(
                f"{path} exists already and is not overwritten: choose another path."
            ) from error
        except (OSError, ValueError) as error:
            raise IdentityError(
                f"Cannot write the key file {path} ({_why(error)}): choose a writable path."
            ) from error
        return Identity(self._key, path)

    def lock(self) -> contextlib.AbstractContextManager[object]:
        """Keep others on this machine from being this peer until the returned context is left; a
        key in memory needs no lock.

        Raises InUseError if another process, or another part of this one, has locked the key file.
        """
        if self.path is None:
            return contextlib.nullcontext()
        path = self.path.resolve()  # one lock, by whatever link the key is named
        return FileLock(
            path.with_name(f"{path.name}.lock"),
            f"The key {str(path)!r}",
            "two nodes with one key would be one peer to all others, so stop that node, or name "
            "another key file with --identity",
        )

    def sign(self, context: str, data: bytes) -> bytes:
        """Return the 64-byte signature over ``data``; it is valid in this context only."""
        return self._key.sign(_signed(context, data))


def _why(error: Exception) -> str:
    system_says = error.strerror if isinstance(error, OSError) else None
    return system_says or str(error) or type(error).__name__


def _read(path: Path) -> bytes:
    """Read at most one byte more than a key file has, after checking kind and mode.

    Raises IdentityError.
    """
    try:
        # O_NONBLOCK: a FIFO must not hang the node.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise IdentityError(
            f"There is no key file {path}: run `shoal id new` to make one."
        ) from error
    except (OSError, ValueError) as error:
        raise IdentityError(
            f"Cannot read the key file {path} ({_why(error)}): make it readable to you."
        ) from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise IdentityError(f"The key file {path} is not a regular file: choose another path.")
        if status.st_mode & 0o077:
            raise IdentityError(
                f"The key file {path} can be read by others: run `chmod 600 {path}` and start "
                "again."
            )
        return os.read(fd, KEY_FILE_BYTES + 1)
    except OSError as error:
        raise IdentityError(
            f"Cannot read the key file {path} ({_why(error)}): check the disk."
        ) from error
    finally:
        os.close(fd)


def _make_private(folder: Path) -> None:
    """Make ``folder`` and its missing parents, each with mode 0700; folders that exist are left as
    they are.
    """
    if not folder.is_dir():
        _make_private(folder.parent)
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except FileExistsError as error:
            raise NotADirectoryError(errno.ENOTDIR, f"{folder} is not a folder") from error


def _write_new(path: Path, blob: bytes) -> None:
    """Write a new file, mode 0600 from its first instant, and force it to the disk."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if os.write(fd, blob) != len(blob):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(fd)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(fd)


def _sync_folder(folder: Path) -> None:
    """Force the new name to the disk as well."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
