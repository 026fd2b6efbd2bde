"""Serving the chunks of snapshots."""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING

from shoal.swarm.errors import NetworkError
from shoal.swarm.p2p.messages import receive_message, send_bytes, send_message
from shoal.swarm.p2p.stream import Stream, short
from shoal.swarm.p2p.stream_places import StreamPlaces
from shoal.swarm.pacing.progress import extension_s
from shoal.swarm.wire.messages import ChunkReply, ChunkRequest

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host

from shoal.swarm.state.snapshot import Snapshot, chunks_in
from shoal.swarm.state.snapshot_cache import SnapshotCache

log = logging.getLogger(__name__)


CHUNKS_PROTOCOL = "/shoal/pieces/1"
MESSAGE_S = 10.0  # for one small message, or without a byte
CHUNK_S = 60.0  # for one chunk; more while it moves (`chunk_s`)
IDLE_S = 30.0  # that a caller may leave a stream without a request
MAX_SERVED = 64  # streams at once
# Of one download:
STREAMS_PER_SOURCE = 2  # streams to one source
MAX_SOURCES = 8


def chunk_s(nbytes: int) -> float:
    """Return the seconds that a chunk may take while it moves: all streams of its download may
    share the slowest link.
    """
    return STREAMS_PER_SOURCE * MAX_SOURCES * extension_s(nbytes)


class ChunkServer:
    """Server of the snapshots in ``kept``."""

    def __init__(self, host: Host, swarm: str, kept: SnapshotCache) -> None:
        self._swarm = swarm
        self._kept = kept
        self._places = StreamPlaces(MAX_SERVED)
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
        """Serve one download, which is what `models_per_hour` counts: each chunk once, until one is
        not held.
        """
        patience_s = IDLE_S
        reading: bytes | None = None
        asked: set[int | None] = set()
        with ExitStack() as download:
            while True:
                # When the caller has all it wants it ends the stream, and this raises NetworkError.
                request = await receive_message(stream, ChunkRequest, patience_s)
                if request.chunk in asked:
                    raise NetworkError(
                        f"peer {short(stream.peer_id)} asked for a chunk twice on one stream.",
                        "refused",
                    )
                asked.add(request.chunk)
                snapshot = None
                if request.swarm == self._swarm:
                    snapshot = self._kept.get(request.snapshot)
                data = None if snapshot is None else _chunk(snapshot, request.chunk)
                if snapshot is None or data is None:
                    missing = ChunkReply(nbytes=0, reason="this peer does not hold it")
                    await send_message(stream, missing, MESSAGE_S)
                    return
                # The digests are fetched before the download begins.
                if request.chunk is not None and request.snapshot != reading:
                    reading = request.snapshot
                    download.close()
                    download.enter_context(self._kept.read(reading))
                # Of what is sent much may still be in buffers before a slow link.
                patience_s = IDLE_S + chunk_s(len(data))
                await send_message(stream, ChunkReply(nbytes=len(data)), MESSAGE_S)
                now = asyncio.get_running_loop().time()
                await send_bytes(
                    stream,
                    data,
                    chunk_timeout=MESSAGE_S,
                    deadline=now + CHUNK_S,
                    longest=now + chunk_s(len(data)),
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
