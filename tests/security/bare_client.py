"""A client of libp2p in one file, with Noise and yamux on asyncio: thousands of keys, from chosen
addresses, in one process.

It answers no stream and checks no signature: it is an attacker's, made to cost little. What it says
is what any client may say.
"""

import asyncio
import hashlib
import hmac
import struct

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from shoal.swarm.identity import Identity
from shoal.swarm.p2p.multiaddr import varint

NOISE = b"Noise_XX_25519_ChaChaPoly_SHA256"  # 32 bytes: it is the first hash itself
DATA, WINDOW, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8
RESERVE = "/libp2p/circuit/relay/0.2.0/hop"


def raw(key):
    return key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


class Key(Identity):
    """A key pair that follows from ``seed``."""

    def __init__(self, seed):
        super().__init__(Ed25519PrivateKey.from_private_bytes(hashlib.sha256(seed).digest()))

    def shown(self, static):
        """Noise's proof that ``static`` is this peer's: protobuf of the public key and of its
        signature.
        """
        public, signed = (
            b"\x08\x01\x12\x20" + self.public_key,
            self._key.sign(b"noise-libp2p-static-key:" + static),
        )
        return b"\x0a" + varint(len(public)) + public + b"\x12" + varint(len(signed)) + signed


class _Secret:
    """Noise's symmetric state."""

    def __init__(self):
        self.hash = self.chain = NOISE
        self.key, self.count = None, 0
        self.mix_hash(b"")

    def mix_hash(self, data):
        self.hash = hashlib.sha256(self.hash + data).digest()

    def derive(self, secret):
        first = hmac.digest(self.chain, secret, "sha256")
        one = hmac.digest(first, b"\x01", "sha256")
        return one, hmac.digest(first, one + b"\x02", "sha256")

    def mix_key(self, secret):
        self.chain, self.key = self.derive(secret)
        self.count = 0

    def encrypt(self, data):
        sent = (
            data
            if self.key is None
            else ChaCha20Poly1305(self.key).encrypt(self._nonce(), data, self.hash)
        )
        self.mix_hash(sent)
        return sent

    def decrypt(self, data):
        found = (
            data
            if self.key is None
            else ChaCha20Poly1305(self.key).decrypt(self._nonce(), data, self.hash)
        )
        self.mix_hash(data)
        return found

    def _nonce(self):
        self.count += 1
        return bytes(4) + (self.count - 1).to_bytes(8, "little")


class Connection:
    """A connection of ``key`` to a node; make it with `to`."""

    @classmethod
    async def to(cls, host, port, key, source=None):
        self = cls()
        self.reader, self.writer = await asyncio.open_connection(
            host, port, local_addr=source and (source, 0)
        )
        self.streams, self.next, self.task = {}, 1, None
        try:
            await self._secure(key)
            self._sealed(_line("/multistream/1.0.0") + _line("/yamux/1.0.0"))
            self.plain = b""
            while self.plain.count(b"/yamux/1.0.0\n") == 0:
                self.plain += await self._opened()
            self.plain = self.plain.partition(b"/yamux/1.0.0\n")[2]
        except BaseException:
            self.close()
            raise
        self.task = asyncio.ensure_future(self._read())
        return self

    async def _secure(self, key):
        self.writer.write(_line("/multistream/1.0.0") + _line("/noise"))
        found = b""
        while not found.endswith(b"/noise\n"):
            found += await self.reader.readexactly(1)
        secret, own, static = _Secret(), X25519PrivateKey.generate(), X25519PrivateKey.generate()
        secret.mix_hash(raw(own))
        self._frame(raw(own) + secret.encrypt(b""))
        answer = await self._framed()
        theirs = X25519PublicKey.from_public_bytes(answer[:32])
        secret.mix_hash(answer[:32])
        secret.mix_key(own.exchange(theirs))
        known = X25519PublicKey.from_public_bytes(secret.decrypt(answer[32:80]))
        secret.mix_key(own.exchange(known))
        secret.decrypt(answer[80:])
        last = secret.encrypt(raw(static))
        secret.mix_key(static.exchange(theirs))
        self._frame(last + secret.encrypt(key.shown(raw(static))))
        out, into = secret.derive(b"")
        self.out, self.into = (ChaCha20Poly1305(out), 0), (ChaCha20Poly1305(into), 0)

    def _frame(self, data):
        self.writer.write(struct.pack(">H", len(data)) + data)

    async def _framed(self):
        return await self.reader.readexactly(
            struct.unpack(">H", await self.reader.readexactly(2))[0]
        )

    def _sealed(self, data):
        for at in range(0, len(data), 65_000):
            cipher, count = self.out
            self._frame(
                cipher.encrypt(bytes(4) + count.to_bytes(8, "little"), data[at : at + 65_000], None)
            )
            self.out = cipher, count + 1

    async def _opened(self):
        cipher, count = self.into
        data = await self._framed()
        self.into = cipher, count + 1
        return cipher.decrypt(bytes(4) + count.to_bytes(8, "little"), data, None)

    async def _exactly(self, size):
        while len(self.plain) < size:
            self.plain += await self._opened()
        data, self.plain = self.plain[:size], self.plain[size:]
        return data

    def _send(self, kind, flags, stream, data=b"", length=None):
        self._sealed(
            struct.pack(">BBHII", 0, kind, flags, stream, len(data) if length is None else length)
            + data
        )

    async def _read(self):
        """Take in frames: answer pings, reset what the node opens, hand on what answers a stream of
        ours.
        """
        try:
            while True:
                _, kind, flags, stream, length = struct.unpack(">BBHII", await self._exactly(12))
                data = await self._exactly(length) if kind == DATA else b""
                if kind == PING and flags & SYN:
                    self._send(PING, ACK, 0, length=length)
                elif flags & SYN:
                    self._send(WINDOW, RST, stream, length=0)
                elif (into := self.streams.get(stream)) is not None:
                    into.feed_data(data)
                    if data:
                        self._send(WINDOW, 0, stream, length=len(data))
                    if flags & (FIN | RST):
                        into.feed_eof()
                        del self.streams[stream]
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            for into in self.streams.values():
                into.feed_eof()
            self.streams.clear()

    @property
    def open(self):
        return self.task is not None and not self.task.done()

    def stream(self, protocol, first=b""):
        """Open a stream of ``protocol`` with ``first`` as its first bytes; return its number and
        its answers, to be read.
        """
        if not self.open:
            raise EOFError("the connection has ended")
        number, self.next = self.next, self.next + 2
        self.streams[number] = asyncio.StreamReader()
        self._send(DATA, SYN, number, _line("/multistream/1.0.0") + _line(protocol) + first)
        return number, self.streams[number]

    async def ask(self, protocol, data):
        """Send one of our framed messages by a stream of its own; return the answer.

        EOFError: there is none.
        """
        number, answers = self.stream(protocol, struct.pack(">I", len(data)) + data)
        try:
            await answers.readuntil(_line(protocol))
            return await answers.readexactly(struct.unpack(">I", await answers.readexactly(4))[0])
        finally:
            self._send(WINDOW, RST, number, length=0)
            self.streams.pop(number, None)

    async def reserve(self):
        """Ask for a slot of the relay; return whether there is one for this peer."""
        try:
            _, answers = self.stream(RESERVE, b"\x02\x08\x00")
            await answers.readuntil(_line(RESERVE))
            (size,) = await answers.readexactly(1)
            if size > 127:
                (more,) = await answers.readexactly(1)
                size += (more - 1) << 7
            return (await answers.readexactly(size)).endswith(
                b"\x28\x64"
            )  # the status is the last field: OK
        except EOFError:
            return False

    def close(self):
        if self.task is not None:
            self.task.cancel()
        self.writer.transport.abort()


def _line(text):
    data = text.encode() + b"\n"
    return varint(len(data)) + data
