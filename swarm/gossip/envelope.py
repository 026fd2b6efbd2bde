"""The form of gossiped messages: a sealed record in an envelope, compressed if that helps; or the
announcement of a larger one.

Nothing is decompressed before its size is known to be allowed, nor beyond the size that was
announced.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Annotated, Generic, Literal, NamedTuple, TypeVar

from pydantic import Field

from shoal.swarm.errors import MessageError
from shoal.swarm.identity import Identity
from shoal.swarm.wire.envelope import (
    ENVELOPE,
    KIB,
    MAX_MESSAGE,
    Bytes,
    M,
    Message,
    PeerId,
    Sha256,
    SwarmId,
    pack,
    seal,
    unpack,
    unseal,
)

T = TypeVar("T")


class BoundedQueue(Generic[T]):
    """A first-in, first-out queue of at most ``items`` items and ``nbytes`` bytes, which no peer
    can make grow.
    """

    def __init__(self, items: int, nbytes: int) -> None:
        self._items = items
        self._nbytes = nbytes
        self._lock = threading.Lock()
        self._held: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._filled: asyncio.Event | None = None

    def __len__(self) -> int:
        return len(self._held)

    def put(
        self, item: T, nbytes: int, drops: Callable[[Sequence[T]], int] = lambda items: 0
    ) -> list[T]:
        """Add an item of ``nbytes`` bytes without waiting; return the dropped items, oldest first.

        For any thread.

        ``drops``: returns which of the items, the oldest first, goes if there are too many.
        """
        dropped = []
        with self._lock:
            self._held.append((item, nbytes))
            self._bytes += nbytes
            while len(self._held) > self._items or self._bytes > self._nbytes:
                place = drops([held for held, _ in self._held])
                old, size = self._held[place]
                del self._held[place]
                self._bytes -= size
                dropped.append(old)
            loop = self._loop
            filled = self._filled
        if loop is not None and filled is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(filled.set)
        return dropped

    async def get(self) -> T:
        """Remove and return the oldest item, as soon as there is one.

        Always called on the same loop.
        """
        while True:
            with self._lock:
                if self._held:
                    item, size = self._held.popleft()
                    self._bytes -= size
                    return item
                if self._filled is None:
                    self._loop = asyncio.get_running_loop()
                    self._filled = asyncio.Event()
                self._filled.clear()
                filled = self._filled
            await filled.wait()


Encoding = Literal["plain", "zlib"]
LEVEL = 6  # of zlib: text of 256 KiB takes some 10 ms


class GossipEnvelope(Message):
    """One gossiped message: ``body`` is a sealed record of ``size`` bytes, or that compressed by
    zlib.
    """

    KIND = "parcel"
    LIMIT = MAX_MESSAGE
    swarm: SwarmId
    encoding: Encoding
    size: Bytes
    body: bytes


class BodyAnnouncement(Message):
    """Announcement of a record too large to be gossiped: ``peer`` serves its body of ``nbytes``
    bytes, ``size`` when expanded.
    """

    KIND = "notice"
    AUTHOR = "peer"
    swarm: SwarmId
    peer: PeerId
    encoding: Encoding
    size: Bytes
    nbytes: Bytes
    sha256: Sha256


class BodyRequest(Message):
    """Request for an announced body."""

    KIND = "body-request"
    swarm: SwarmId
    sha256: Sha256


class BodyReply(Message):
    """The number of bytes that follow; 0 if the peer does not hold the body (any more)."""

    KIND = "body-reply"
    nbytes: Annotated[int, Field(ge=0, le=2**32)]


class Opened(NamedTuple):
    """A record whose signature by ``author`` was verified.

    ``content`` identifies it however it was packed; ``sealed``: as it was
    signed.
    """

    author: str
    message: Message
    content: bytes
    sealed: bytes


class Body(NamedTuple):
    """A sealed record, compressed or not; ``size``: uncompressed."""

    encoding: Encoding
    size: int
    data: bytes


def content_of(author: str, message: Message) -> bytes:
    """Return the SHA-256 that identifies a record: of author and content, not of the bytes in which
    it arrived.
    """
    return hashlib.sha256(author.encode() + b"\x00" + pack(message)).digest()


def make_body(message: Message, identity: Identity) -> Body:
    """Seal ``message``, and compress it if that makes it smaller.

    Raises MessageError if it exceeds its kind's limit.
    """
    sealed = seal(message, identity)
    small = zlib.compress(sealed, LEVEL)
    return (
        Body("zlib", len(sealed), small)
        if len(small) < len(sealed)
        else Body("plain", len(sealed), sealed)
    )


def make_envelope(swarm: str, body: Body) -> bytes | None:
    """Return the bytes to gossip, or None if they would be too many."""
    if len(body.data) > MAX_MESSAGE - KIB // 2:
        return None
    return pack(GossipEnvelope(swarm=swarm, encoding=body.encoding, size=body.size, body=body.data))


def make_announcement(swarm: str, body: Body, identity: Identity) -> bytes:
    """Return the bytes to gossip for a body that has to be fetched."""
    digest = hashlib.sha256(body.data).digest()
    announcement = BodyAnnouncement(
        swarm=swarm,
        peer=identity.peer_id,
        encoding=body.encoding,
        size=body.size,
        nbytes=len(body.data),
        sha256=digest,
    )
    data = make_envelope(swarm, make_body(announcement, identity))
    assert data is not None  # an announcement is small
    return data


def open_envelope(data: bytes, swarm: str, limit: int) -> GossipEnvelope:
    """Open the envelope in ``data``, whose record claims at most ``limit``, unexpanded.

    Raises MessageError and nothing else.
    """
    envelope = unpack(data, GossipEnvelope)
    if envelope.swarm != swarm:
        raise MessageError("A message of another swarm was refused.", "foreign-swarm")
    check_size(envelope.size, len(envelope.body), limit)
    return envelope


def check_size(size: int, nbytes: int, limit: int) -> None:
    """Raise MessageError if a record that claims ``size`` bytes, ``nbytes`` compressed, exceeds
    ``limit``.
    """
    if max(size, nbytes) > limit:
        raise MessageError(
            f"A record of {max(size, nbytes)} bytes was refused: at most {limit} are allowed.",
            "oversized",
        )


def expand(encoding: Encoding, size: int, data: bytes) -> bytes:
    """Return the sealed record, of exactly ``size`` bytes.

    Raises MessageError after making at most ``size`` + 1 bytes.
    """
    if encoding == "plain":
        if len(data) == size:
            return data
        reason = "truncated" if len(data) < size else "malformed"
        raise MessageError(f"A record of {len(data)} bytes was refused: it claims {size}.", reason)
    unzip = zlib.decompressobj()
    try:
        sealed = unzip.decompress(data, size + 1)
    except zlib.error as error:
        raise MessageError(f"A record was refused: it does not decompress ({error}).") from None
    if len(sealed) > size:
        raise MessageError(
            f"A record was refused: it claims {size} bytes and decompresses to more.", "bomb"
        )
    if not unzip.eof:
        raise MessageError("A record was refused: it was cut short.", "truncated")
    if len(sealed) != size or unzip.unused_data:
        raise MessageError(
            f"A record was refused: {len(sealed)} bytes and a rest are not the {size} it claims."
        )
    return sealed


def open_body(encoding: Encoding, size: int, data: bytes, *kinds: type[M]) -> Opened:
    """Open the record in a body, one of ``kinds``, in a worker thread: it takes some ms.

    Raises MessageError and nothing else.
    """
    author, message = unseal(sealed := expand(encoding, size, data), *kinds)
    return Opened(author, message, content_of(author, message), sealed)


def room_for(kind: type[Message]) -> int:
    """Return the largest number of bytes of a sealed record of ``kind``."""
    return max(kind.LIMIT, BodyAnnouncement.LIMIT) + ENVELOPE
