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
from shoal.swarm.state.chunks import ChunkSource, NotHeldError
from shoal.swarm.state.snapshot import DIGEST, chunk_size, chunks_in, snapshot_id
from shoal.swarm.state.spool import Spool, spool_for
from shoal.swarm.wire.digest import CHUNK
from shoal.swarm.wire.state import StateHeader

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host

LANES = 2  # streams to one source
TWICE = 2  # sources that are asked for the same chunk when there is nothing else to ask for
MAX_SOURCES = 8

Peer = tuple[str, Sequence[str]]
"""Peer id and addresses."""

log = logging.getLogger(__name__)


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
        """Number of missing chunks."""
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
    def have(self) -> set[int]:
        """Chunks that are here and verified."""
        ...

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
        """Chunks that are here."""
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
