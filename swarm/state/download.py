"""Downloading a snapshot from several peers at once: each chunk comes from a free source and is checked on arrival.

`ChunkPlan` decides which chunk is asked of whom. `download` keeps two streams to each source: no link is idle while a request
travels. A chunk arrives in a scratch buffer and enters the sink only if its digest is right. A peer that sends a wrong chunk is not
asked again; one that dies or stalls costs the chunks it was sending. What a sink has is never asked for again, so an interrupted
download goes on with the same sink.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from blake3 import blake3
from torch import Tensor

from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.p2p.stream import short
from shoal.swarm.p2p.stream_places import StreamPlaces
from shoal.swarm.pacing.progress import slow_s
from shoal.swarm.state.snapshot import DIGEST, Snapshot, SnapshotCache, Spool, chunk_size, chunks_in, snapshot_id, spool_for
from shoal.swarm.wire.digest import CHUNK
from shoal.swarm.wire.envelope import pack, unpack
from shoal.swarm.wire.state import ChunkReply, ChunkRequest, StateHeader

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
        if self._stream is not None:
            self._stream.abort()
            self._stream = None


LANES = 2  # streams to one source
TWICE = 2  # sources that are asked for the same chunk when there is nothing else to ask for
MAX_SOURCES = 8

Peer = tuple[str, Sequence[str]]
"""Peer id and addresses."""


class WrongChunkError(MessageError):
    """A peer sent something other than the snapshot's chunk."""


class ChunkPlan:
    """Assignment of missing chunks to lanes, without any network.

    Each missing chunk is asked of one lane at a time. When all are assigned, the rest are also asked of a second source,
    so that one slow source does not delay the download.
    """

    def __init__(self, missing: Iterable[int]) -> None:
        self._free = deque(missing)
        self._asked: dict[int, list[object]] = {}
        """Lanes that were asked for each chunk, in the order in which they were asked."""
        self._source: dict[object, object] = {}
        """The source of each lane."""

    @property
    def done(self) -> bool:
        """True when nothing is missing."""
        return not self._free and not self._asked

    @property
    def left(self) -> int:
        return len(self._free) + len(self._asked)

    def ask(self, lane: object, source: object) -> int | None:
        """Return the chunk to ask of ``lane``, which leads to ``source``, now; or None."""
        self._source[lane] = source
        if self._free:
            chunk = self._free.popleft()
        else:
            # Of the same source a second copy would only slow down the first.
            waiting = [
                chunk for chunk, lanes in self._asked.items() if len(lanes) < TWICE and source not in map(self._source.get, lanes)
            ]
            if not waiting:
                return None
            chunk = waiting[0]
        self._asked.setdefault(chunk, []).append(lane)
        return chunk

    def got(self, chunk: int) -> bool:
        """Note that a right chunk has arrived; return False if it had arrived before."""
        return self._asked.pop(chunk, None) is not None

    def lost(self, lane: object) -> None:
        """Note that ``lane`` is gone: chunks that only it was asked for are asked of others first."""
        for chunk, lanes in list(self._asked.items()):
            if lane in lanes:
                lanes.remove(lane)
                if not lanes:
                    del self._asked[chunk]
                    self._free.appendleft(chunk)


class ChunkSink(Protocol):
    """Store of verified chunks."""

    @property
    def have(self) -> set[int]: ...

    def write(self, chunk: int, data: memoryview) -> None:
        """Keep one verified chunk; called once for each."""
        ...


class MemorySink:
    """Sink of ``nbytes`` bytes that are kept until it is gone: in memory, or in a file if they are many.

    ``content``: bytes of that number to begin with, in which the chunks ``have`` are right already.
    """

    def __init__(self, nbytes: int, content: Tensor | Spool | None = None, have: Iterable[int] = ()) -> None:
        if content is None:
            content = spool_for(nbytes) or torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self.content: Tensor | Spool = content
        self._have = set(have)

    @property
    def have(self) -> set[int]:
        return self._have

    def write(self, chunk: int, data: memoryview) -> None:
        """Copy one chunk into its place."""
        if isinstance(self.content, Spool):
            self.content.write(chunk * CHUNK, data)
        else:
            self.content.numpy().data[chunk * CHUNK : chunk * CHUNK + len(data)] = data
        self._have.add(chunk)


async def fetch_digests(host: Host, swarm: str, header: StateHeader, sources: Sequence[Peer]) -> bytes:
    """Fetch the list of the chunks' digests from the first of ``sources`` that has it, and check it.

    Raises:
        NetworkError: none has it.
    """
    room = bytearray(DIGEST * chunks_in(header.nbytes))
    for peer, addresses in sources:
        source = ChunkSource(host, swarm, snapshot_id(header), peer, addresses)
        try:
            await source.take(None, memoryview(room))
        except (NetworkError, MessageError) as error:
            log.info("no digests: %s", error)
            continue
        finally:
            source.close()
        if hashlib.sha256(room).digest() == header.sha256:
            return bytes(room)
        log.warning("peer %s served digests that are not those of the weights it offered: it is not asked again", short(peer))
    raise NetworkError("none of the peers that were asked holds the weights any more.")


async def download(
    host: Host,
    swarm: str,
    header: StateHeader,
    digests: bytes,
    sources: Sequence[Peer],
    sink: ChunkSink,
    wanted: Iterable[int],
) -> set[str]:
    """Fetch the chunks ``wanted`` that ``sink`` lacks from ``sources``; those that do not hold the snapshot are skipped.

    Returns the peers that sent a wrong chunk.

    Raises:
        NetworkError: no source is left; what arrived is in the sink.
    """
    work = _Download(host, swarm, header, digests, sink, ChunkPlan(chunk for chunk in wanted if chunk not in sink.have))
    if not work.plan.done:
        await work.run(list(sources)[:MAX_SOURCES])
    return work.wrong


class _Download:
    def __init__(self, host: Host, swarm: str, header: StateHeader, digests: bytes, sink: ChunkSink, plan: ChunkPlan) -> None:
        self.plan, self.wrong = plan, set[str]()
        self._host, self._swarm, self._header, self._digests, self._sink = host, swarm, header, digests, sink
        self._id = snapshot_id(header)
        self._gone: set[str] = set()
        self._change = asyncio.Event()

    async def run(self, sources: Sequence[Peer]) -> None:
        lanes = [asyncio.ensure_future(self._lane(peer)) for _ in range(LANES) for peer in sources]
        whole = asyncio.ensure_future(self._whole())
        pending: set[asyncio.Future[None]] = {whole, *lanes}
        try:
            while not whole.done() and len(pending) > 1:
                finished, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for one in finished:
                    one.result()  # what a sink raises, a full disk for instance
        finally:
            for one in (whole, *lanes):
                one.cancel()
            await asyncio.gather(whole, *lanes, return_exceptions=True)
        if not self.plan.done:
            raise NetworkError(f"the peers that hold the weights are gone with {self.plan.left} chunks missing.")

    async def _whole(self) -> None:
        while not self.plan.done:
            await self._changed()

    async def _changed(self) -> None:
        await self._change.wait()

    def _notify(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    async def _lane(self, to: Peer) -> None:
        peer, addresses = to
        source = ChunkSource(self._host, self._swarm, self._id, peer, addresses)
        scratch = memoryview(bytearray(min(CHUNK, self._header.nbytes)))
        try:
            while peer not in self._gone and not self.plan.done:
                chunk = self.plan.ask(source, peer)
                if chunk is None:
                    await self._changed()
                    continue
                room = scratch[: chunk_size(self._header.nbytes, chunk)]
                await source.take(chunk, room)
                if blake3(room).digest() != self._digests[chunk * DIGEST : (chunk + 1) * DIGEST]:
                    self.wrong.add(peer)
                    raise WrongChunkError(
                        f"peer {short(peer)} served a chunk of the weights that does not match its digest: it is not asked "
                        "again, and the chunk is fetched elsewhere."
                    )
                if self.plan.got(chunk):
                    self._sink.write(chunk, room)
                self._notify()
        except NotHeldError as error:
            self._gone.add(peer)
            log.debug("%s", error)
        except (NetworkError, MessageError) as error:
            self._gone.add(peer)
            log.warning("%s", error)
        finally:
            self.plan.lost(source)
            source.close()
            self._notify()
