"""Downloading a snapshot from several peers at once: each chunk comes from a free source.

`ChunkPlan` decides which chunk is asked of whom. `download` keeps two streams to each source: no
link is idle while a request is under way. A chunk arrives in a scratch buffer and enters the sink
only if its digest is right. A peer that sends a wrong chunk is not asked again; one that dies or
stalls costs the chunks it was sending. What a sink has is never asked for again, so an interrupted
download goes on with the same sink.

All streams may share the slowest link that counts, so a single one may be slow; all together must
bring what that link carries, or the download is given up.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Protocol

import torch
from blake3 import blake3
from torch import Tensor

from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.p2p.messages import ask, receive_bytes
from shoal.swarm.p2p.stream import Stream, short
from shoal.swarm.p2p.tasks import running
from shoal.swarm.pacing.progress import SLOWEST_BYTES_PER_S, extension_s
from shoal.swarm.wire.envelope import CHUNK
from shoal.swarm.wire.messages import ChunkReply, ChunkRequest, StateHeader

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host

from shoal.swarm.state.chunk_server import (
    CHUNK_S,
    CHUNKS_PROTOCOL,
    MAX_SOURCES,
    MESSAGE_S,
    STREAMS_PER_SOURCE,
    chunk_s,
)
from shoal.swarm.state.snapshot import DIGEST_BYTES, chunk_size, chunks_in, snapshot_id
from shoal.swarm.state.spool import Spool, spool_for

log = logging.getLogger(__name__)


class NotHeldError(NetworkError):
    """A peer does not hold the snapshot, or no longer."""


class ChunkSource:
    """Stream to a peer that may hold the snapshot ``id``.

    Use it on the host's loop, and ``close`` it.
    """

    def __init__(
        self, host: Host, swarm: str, id: bytes, peer: str, addresses: Sequence[str]
    ) -> None:
        self._host = host
        self._swarm = swarm
        self._id = id
        self.peer = peer
        self._addresses = addresses
        self._stream: Stream | None = None
        self.closed = False

    @property
    def received(self) -> int:
        """Bytes that have come by now, also of chunks that are not whole yet."""
        return 0 if self._stream is None else self._stream.received

    async def take(self, chunk: int | None, room: memoryview) -> None:
        """Fill ``room``, which has the size of the chunk, with what the peer sends for it,
        unchecked. None: the list of digests.

        Raises NotHeldError; NetworkError, MessageError if it cannot be reached, is too slow, or
        violates the protocol.
        """
        if self._stream is None:
            self._stream = await self._host.open(
                self.peer, CHUNKS_PROTOCOL, addresses=self._addresses, timeout=MESSAGE_S
            )
            if self.closed:
                self.close()
                raise NetworkError("the download is over.")
        stream = self._stream
        request = ChunkRequest(swarm=self._swarm, snapshot=self._id, chunk=chunk)
        reply = await ask(stream, request, ChunkReply, MESSAGE_S)
        if not reply.nbytes:
            raise NotHeldError(f"peer {short(self.peer)} does not hold these weights any more.")
        if reply.nbytes != len(room):
            raise MessageError(
                f"peer {short(self.peer)} announced a chunk of {reply.nbytes} bytes where "
                f"{len(room)} fit."
            )
        now = asyncio.get_running_loop().time()
        await receive_bytes(
            stream,
            room,
            chunk_timeout=MESSAGE_S,
            deadline=now + CHUNK_S,
            # The list is fetched alone.
            longest=now + (extension_s(len(room)) if chunk is None else chunk_s(len(room))),
        )

    def close(self) -> None:
        self.closed = True
        if self._stream is not None:
            self._stream.abort()


MAX_SOURCES_OF_CHUNK = 2
"""That are asked for the same chunk when there is nothing else to ask for."""

Peer = tuple[str, Sequence[str]]
"""Peer id and addresses."""


class ChunkPlan:
    """Assignment of missing chunks to lanes, without any network.

    Each missing chunk is asked of one lane at a time. When all are assigned, the rest are also
    asked of a second source, so that one slow source does not delay the download.
    """

    def __init__(self, missing: Iterable[int]) -> None:
        self._free = deque(missing)
        # Lanes that were asked for each chunk, in the order in which they were asked.
        self._asked: dict[int, list[object]] = {}
        self._source: dict[object, object] = {}  # the source of each lane

    @property
    def done(self) -> bool:
        return not self._free and not self._asked

    @property
    def left(self) -> int:
        return len(self._free) + len(self._asked)

    @property
    def busy(self) -> int:
        """Lanes that were asked for a chunk which has not arrived."""
        return sum(len(lanes) for lanes in self._asked.values())

    def ask(self, lane: object, source: object) -> int | None:
        """Return the chunk to ask of ``lane``, which leads to ``source``, now; or None."""
        self._source[lane] = source
        if self._free:
            chunk = self._free.popleft()
        else:
            again = self._second_copy(source)
            if again is None:
                return None
            chunk = again
        self._asked.setdefault(chunk, []).append(lane)
        return chunk

    def _second_copy(self, source: object) -> int | None:
        """Return a chunk that another source was asked for, and may be slow to give.

        Of the same source a second copy would only slow down the first.
        """
        for chunk, lanes in self._asked.items():
            sources = [self._source.get(lane) for lane in lanes]
            if len(lanes) < MAX_SOURCES_OF_CHUNK and source not in sources:
                return chunk
        return None

    def got(self, chunk: int) -> bool:
        """Note that a right chunk has arrived; return False if it had arrived before."""
        return self._asked.pop(chunk, None) is not None

    def lost(self, lane: object) -> None:
        """Note that ``lane`` is gone: chunks that only it was asked for are asked of others
        first.
        """
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
    """Sink of ``nbytes`` bytes that are kept until it is gone: in memory, or in a file if they are
    many.

    ``content``: bytes of that number to begin with, in which the chunks ``have`` are right already.
    """

    def __init__(
        self, nbytes: int, content: Tensor | Spool | None = None, have: Iterable[int] = ()
    ) -> None:
        if content is None:
            content = spool_for(nbytes) or torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self.content: Tensor | Spool = content
        self.have = set(have)

    def write(self, chunk: int, data: memoryview) -> None:
        if isinstance(self.content, Spool):
            self.content.write(chunk * CHUNK, data)
        else:
            self.content.numpy().data[chunk * CHUNK : chunk * CHUNK + len(data)] = data
        self.have.add(chunk)


async def fetch_digests(
    host: Host, swarm: str, header: StateHeader, sources: Sequence[Peer]
) -> bytes:
    """Fetch the list of the chunks' digests from the first of ``sources`` that has it, and check
    it. NetworkError: none has.
    """
    room = bytearray(DIGEST_BYTES * chunks_in(header.nbytes))
    for peer, addresses in sources:
        try:
            with closing(ChunkSource(host, swarm, snapshot_id(header), peer, addresses)) as source:
                await source.take(None, memoryview(room))
        except (NetworkError, MessageError) as error:
            log.info("no digests: %s", error)
            continue
        if hashlib.sha256(room).digest() == header.sha256:
            return bytes(room)
        log.warning(
            "peer %s served digests that are not those of the weights it offered: it is not asked "
            "again",
            short(peer),
        )
    raise NetworkError("none of the peers that were asked holds the weights any more.")


async def download(
    host: Host,
    swarm: str,
    header: StateHeader,
    digests: bytes,
    sources: Sequence[Peer],
    sink: ChunkSink,
    wanted: Iterable[int],
    arrived: Callable[[int], None] = lambda nbytes: None,
) -> set[str]:
    """Fetch the chunks ``wanted`` that ``sink`` lacks from ``sources``; those that do not hold the
    snapshot are skipped.

    ``arrived`` gets the bytes of each chunk that was right. Returns the peers that sent a wrong
    chunk. Raises NetworkError if no source is left; what arrived is in the sink.
    """
    work = _Download(
        host,
        swarm,
        header,
        digests,
        sink,
        ChunkPlan(chunk for chunk in wanted if chunk not in sink.have),
        arrived,
    )
    if not work.plan.done:
        await work.run(list(sources)[:MAX_SOURCES])
    return work.wrong


class _Download:
    def __init__(
        self,
        host: Host,
        swarm: str,
        header: StateHeader,
        digests: bytes,
        sink: ChunkSink,
        plan: ChunkPlan,
        arrived: Callable[[int], None],
    ) -> None:
        self.plan = plan
        self.wrong: set[str] = set()  # peers that sent a wrong chunk
        self._arrived = arrived
        self._host = host
        self._swarm = swarm
        self._header = header
        self._digests = digests
        self._sink = sink
        self._id = snapshot_id(header)
        self._gone: set[str] = set()
        self._change = asyncio.Event()
        self._sources: list[ChunkSource] = []

    async def run(self, sources: Sequence[Peer]) -> None:
        streams = []
        for _ in range(STREAMS_PER_SOURCE):
            streams += [self._lane(peer) for peer in sources]
        async with running(self._whole(), self._trickles(), *streams) as (whole, slow, *lanes):
            pending: set[asyncio.Future[None]] = {whole, slow, *lanes}
            while not whole.done() and not slow.done() and len(pending) > 2:
                finished, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for one in finished:
                    one.result()  # what a sink raises, a full disk for instance
            is_slow = slow.done()
            # A lane that loses its cancellation (`wait_for` before Python 3.12) would take one more
            # chunk, which may take an hour.
            for source in self._sources:
                source.close()
        if not self.plan.done:
            what = "send them too slowly," if is_slow else "are gone"
            raise NetworkError(
                f"the peers that hold the weights {what} with {self.plan.left} chunks missing."
            )

    async def _whole(self) -> None:
        while not self.plan.done:
            await self._change.wait()

    async def _trickles(self) -> None:
        """Return once all lanes together bring less than the slowest link that counts.

        How many of the sources hold the snapshot is known after the first minute. A lane that has
        nothing left to ask for leaves its share of the link unused.
        """
        await asyncio.sleep(CHUNK_S)
        while True:
            before = self._received()
            await asyncio.sleep(CHUNK_S)
            lanes = sum(not source.closed for source in self._sources)
            least = SLOWEST_BYTES_PER_S * CHUNK_S * self.plan.busy / max(lanes, 1)
            if self._received() - before < least:
                return

    def _received(self) -> int:
        return sum(source.received for source in self._sources)

    def _notify(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    async def _lane(self, to: Peer) -> None:
        peer, addresses = to
        source = ChunkSource(self._host, self._swarm, self._id, peer, addresses)
        self._sources.append(source)
        scratch = memoryview(bytearray(min(CHUNK, self._header.nbytes)))
        try:
            while peer not in self._gone and not self.plan.done:
                chunk = self.plan.ask(source, peer)
                if chunk is None:
                    await self._change.wait()
                    continue
                room = scratch[: chunk_size(self._header.nbytes, chunk)]
                await source.take(chunk, room)
                at = chunk * DIGEST_BYTES
                if blake3(room).digest() != self._digests[at : at + DIGEST_BYTES]:
                    self.wrong.add(peer)
                    raise MessageError(
                        f"peer {short(peer)} served a chunk of the weights that does not match its "
                        "digest: it is not asked again, and the chunk is fetched elsewhere."
                    )
                if self.plan.got(chunk):
                    self._sink.write(chunk, room)
                    self._arrived(len(room))
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
