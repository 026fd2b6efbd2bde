"""Chunks of snapshots: serving them, and fetching one from one peer. `shoal.swarm.state.download` decides what to ask of whom."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.p2p.stream import short
from shoal.swarm.p2p.stream_places import StreamPlaces
from shoal.swarm.pacing.progress import slow_s
from shoal.swarm.state.snapshot import Snapshot, SnapshotCache, chunks_in
from shoal.swarm.wire.envelope import pack, unpack
from shoal.swarm.wire.state import ChunkReply, ChunkRequest

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host
    from shoal.swarm.p2p.stream import Stream

CHUNKS_PROTOCOL = "/shoal/pieces/1"
SMALL_S = 10.0  # seconds for one small message, or without a byte
CHUNK_S = 60.0  # seconds for one chunk; more while it moves
IDLE_S = 30.0  # seconds that a caller may leave a stream without a request
MAX_SERVED = 64  # streams served at once

log = logging.getLogger(__name__)

NOTHING = memoryview(b"")


class NotHeldError(NetworkError):
    """A peer does not hold the snapshot, or no longer."""


class ChunkServer:
    """Server of the snapshots in ``kept``."""

    def __init__(self, host: Host, swarm: str, kept: SnapshotCache) -> None:
        self._swarm, self._kept, self._places = swarm, kept, StreamPlaces(MAX_SERVED)
        host.serve(CHUNKS_PROTOCOL, self._answer)

    async def _answer(self, stream: Stream) -> None:
        if not self._places.take(stream):
            stream.abort()
            return
        try:
            await self._serve(stream)
        finally:
            self._places.free(stream)

    async def _serve(self, stream: Stream) -> None:
        while True:
            # When the caller has all it wants it ends the stream, and this raises NetworkError.
            request = unpack(await stream.receive(ChunkRequest.LIMIT, IDLE_S), ChunkRequest)
            snapshot = self._kept.get(request.snapshot) if request.swarm == self._swarm else None
            data = None if snapshot is None else _chunk(snapshot, request.chunk)
            if data is None:
                await stream.send(pack(ChunkReply(nbytes=0, reason="this peer does not hold it")), SMALL_S)
                continue
            await stream.send(pack(ChunkReply(nbytes=len(data))), SMALL_S)
            now = asyncio.get_running_loop().time()
            await stream.swap(
                data, memoryview(bytearray()), chunk_timeout=SMALL_S, deadline=now + CHUNK_S, longest=now + slow_s(len(data))
            )


def _chunk(snapshot: Snapshot, chunk: int | None) -> memoryview | None:
    if chunk is None:
        return memoryview(snapshot.digests)
    if chunk >= chunks_in(snapshot.header.nbytes):
        return None
    try:
        return snapshot.chunk(chunk)
    except OSError as error:
        log.warning("weights are not served: %s", error)
        return None


class ChunkSource:
    """Stream to a peer that may hold the snapshot ``id``. Use it on the host's loop, and ``close`` it."""

    def __init__(self, host: Host, swarm: str, id: bytes, peer: str, addresses: Sequence[str]) -> None:
        self._host, self._swarm, self._id, self.peer, self._addresses = host, swarm, id, peer, addresses
        self._stream: Stream | None = None

    async def take(self, chunk: int | None, room: memoryview) -> None:
        """Fill ``room``, which has the size of the chunk, with what the peer sends for it, unchecked. None: the list of digests.

        Raises:
            NotHeldError: the peer does not hold the snapshot.
            NetworkError, MessageError: it cannot be reached, is too slow, or does not keep to the protocol.
        """
        if self._stream is None:
            self._stream = await self._host.open(self.peer, CHUNKS_PROTOCOL, addresses=self._addresses, timeout=SMALL_S)
        stream = self._stream
        await stream.send(pack(ChunkRequest(swarm=self._swarm, snapshot=self._id, chunk=chunk)), SMALL_S)
        reply = unpack(await stream.receive(ChunkReply.LIMIT, SMALL_S), ChunkReply)
        if not reply.nbytes:
            raise NotHeldError(f"peer {short(self.peer)} does not hold these weights any more.")
        if reply.nbytes != len(room):
            raise MessageError(f"peer {short(self.peer)} announced a chunk of {reply.nbytes} bytes where {len(room)} fit.")
        now = asyncio.get_running_loop().time()
        await stream.swap(NOTHING, room, chunk_timeout=SMALL_S, deadline=now + CHUNK_S, longest=now + slow_s(len(room)))

    def close(self) -> None:
        """End the stream at once."""
        if self._stream is not None:
            self._stream.abort()
            self._stream = None
