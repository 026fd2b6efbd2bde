"""Locks that keep two processes from using one key or folder at a time, and files that are replaced
as a whole.

The kernel frees a lock when its holder ends, however that ends, so none is ever stale. Children do
not hold it: programs that are started do not inherit it, and forks give up their copy at once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
from pathlib import Path

from shoal.swarm.errors import ShoalError

log = logging.getLogger(__name__)

_HOLDER_BYTES = 256
_HOST_CHARS = 200
_TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


def replace_file(path: Path, content: str | bytes) -> None:
    """Write the file ``path`` anew, whole or not at all: nobody ever reads a part of it.

    Raises OSError.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


class InUseError(ShoalError):
    """A key or folder that another process uses."""


class FileLock:
    """An exclusive lock, from its making to `release`.

    Where a file system has no locks, a warning says so.

    Args:
        path: the lock file; it holds the process id of the holder, and is removed at the release.
        what: what the lock protects, for people: "The folder 'runs/a'".
        remedy: what to do if that is in use, for people: "stop that node, or choose another
            folder".

    Raises:
        InUseError: it is in use; the sentence names the process.
    """

    def __init__(self, path: Path, what: str, remedy: str) -> None:
        self._path = path.absolute()
        self._what = what
        self._remedy = remedy
        try:
            fd = self._take()
            # Its holder released it, and removed the file, between the opening and the locking.
            while fd is None:
                fd = self._take()
        except OSError as error:
            log.warning(
                "%s cannot be locked (%s): make sure that no second node uses it",
                what,
                error.strerror,
            )
            fd = None
        self._fd = fd
        if fd is not None:
            _held.add(self)
            # On a full disk the lock holds, only the holder is not named.
            with contextlib.suppress(OSError):
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()} {_host_name()}\n".encode(), 0)

    def _take(self) -> int | None:
        """Return the locked file; None if it is not the one at the path any more.

        Raises InUseError or OSError.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(self._path, flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(self._path)):
                    mine = fd
                    fd = -1
                    return mine
            return None
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            holder = _shown(os.pread(fd, _HOLDER_BYTES, 0))
            raise InUseError(f"{self._what} is in use by {holder}: {self._remedy}.") from None
        finally:
            if fd >= 0:
                os.close(fd)

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()  # before the release: afterwards it may be another's
            self._close()

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            _held.discard(self)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


_held: set[FileLock] = set()


def _forked() -> None:
    """Close a fork's copies of the descriptors: the parent alone holds its locks."""
    for lock in list(_held):
        lock._close()


os.register_at_fork(after_in_child=_forked)


def _host_name() -> str:
    return socket.gethostname()[:_HOST_CHARS]


def _shown(holder: bytes) -> str:
    """Describe a holder by the content of its lock file, which may be empty or anything."""
    pid, _, host = holder.decode("utf-8", "replace").strip().partition(" ")
    if not (pid.isascii() and pid.isdecimal()):
        return "another process"
    if not host.isprintable() or host in ("", _host_name()):
        return "this process already" if int(pid) == os.getpid() else f"process {pid}"
    return f"process {pid} on {host}"
