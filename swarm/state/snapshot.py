"""Snapshots: a swarm's state as immutable bytes named by a hash, and the cache of those that this
node hands out.

The id is the SHA-256 of the header, which holds the hash of the list of the chunks' digests. A peer
that knows the id can therefore check every chunk, whatever its source, and peers that hold the same
round's weights offer the same id without coordination.

Large snapshots lie in files without a name, so that handing weights out takes no main memory beside
the system's cache.

Downloading a snapshot from several peers at once: each chunk comes from a free source and is
checked on arrival.

`ChunkPlan` decides which chunk is asked of whom. `download` keeps two streams to each source: no
link is idle while a request travels. A chunk arrives in a scratch buffer and enters the sink only
if its digest is right. A peer that sends a wrong chunk is not asked again; one that dies or stalls
costs the chunks it was sending. What a sink has is never asked for again, so an interrupted
download goes on with the same sink.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import math
import mmap
import os
import struct
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, overload

import torch
from blake3 import blake3
from torch import Tensor

from shoal.optim.codecs.base import FLOAT32, Shape
from shoal.optim.exchange.base import OnDemand
from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.exchange.contribution import BorrowedPayload
from shoal.swarm.p2p.limits import StreamPlaces
from shoal.swarm.p2p.stream import Stream, short
from shoal.swarm.p2p.tasks import running
from shoal.swarm.pacing.progress import extension_s
from shoal.swarm.wire.envelope import CHUNK, pack, pack_shapes, unpack
from shoal.swarm.wire.messages import ChunkReply, ChunkRequest, StateHeader

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host

LARGE = 16 << 20  # bytes from which on a snapshot is not held in memory
ON_DISK = Path("/var/tmp")  # the usual folder may lie in memory itself


class Spool:
    """File of ``nbytes`` bytes that is gone with the last that uses it.

    OSError if the disk has no room for it.
    """

    def __init__(self, nbytes: int) -> None:
        folder = ON_DISK if "TMPDIR" not in os.environ and os.access(ON_DISK, os.W_OK) else None
        # It is closed when it is gone.
        self._file = tempfile.TemporaryFile(prefix="shoal-", dir=folder, buffering=0)  # noqa: SIM115
        self.nbytes = nbytes
        os.posix_fallocate(self._file.fileno(), 0, nbytes)

    def write(self, offset: int, data: memoryview) -> None:
        """Write ``data`` at ``offset``. OSError if the disk fails."""
        written = 0
        while written < len(data):
            written += os.pwrite(self._file.fileno(), data[written:], offset + written)

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Return the bytes at ``offset``. OSError if the disk fails."""
        return memoryview(os.pread(self._file.fileno(), nbytes, offset))

    def mapped(self, offset: int, shape: Sequence[int]) -> Tensor:
        """Return float32 values at ``offset``, mapped rather than read, while the tensor is used;
        changes stay in memory.
        """
        count = math.prod(shape)
        before = offset % mmap.ALLOCATIONGRANULARITY
        if not count:
            return torch.empty(shape, device="cpu")
        pages = mmap.mmap(
            self._file.fileno(), before + 4 * count, access=mmap.ACCESS_COPY, offset=offset - before
        )
        return torch.frombuffer(pages, dtype=torch.float32, count=count, offset=before).view(shape)


class SpooledTensors(Sequence[Tensor]):
    """Float32 tensors of these ``shapes``, one behind the other from ``offset`` on, each mapped
    when it is taken.

    So a state that waits to be taken over, or is taken over tensor by tensor, takes no memory.
    """

    def __init__(self, spool: Spool, offset: int, shapes: Sequence[Shape]) -> None:
        self._spool = spool
        self._shapes = list(shapes)
        self._offsets = list(
            itertools.accumulate((4 * math.prod(shape) for shape in shapes), initial=offset)
        )

    def __len__(self) -> int:
        return len(self._shapes)

    @overload
    def __getitem__(self, place: int) -> Tensor: ...
    @overload
    def __getitem__(self, place: slice) -> list[Tensor]: ...
    def __getitem__(self, place: int | slice) -> Tensor | list[Tensor]:
        if isinstance(place, slice):
            return [self[number] for number in range(len(self))[place]]
        return self._spool.mapped(self._offsets[range(len(self))[place]], self._shapes[place])


def spool_for(nbytes: int) -> Spool | None:
    """Return a file for a snapshot; None if it is to be in memory: it is small, or no disk takes
    it.
    """
    try:
        return Spool(nbytes) if nbytes >= LARGE and hasattr(os, "posix_fallocate") else None
    except OSError:
        return None


DIGEST = 32  # bytes of a chunk's BLAKE3
# snapshots that a node holds at most, each as large as its slow weights and shared state in float32
KEPT = 2
UNUSED_S = 120.0  # seconds after which a snapshot that nobody asks for is dropped
BUSY_S = 15.0  # seconds since a snapshot was offered in which its first download may begin


@dataclass(frozen=True)
class State:
    """State of a swarm: slow weights (float32, CPU) before round ``round``."""

    round: int
    slow: Sequence[Tensor]
    extra: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    """State that the source's rule shares beside them, such as DiLoCo's momentum; float32, by the
    rule's own names.
    """
    applied: Sequence[int] = ()
    """For each fragment the round whose outcome is in it; -1: none."""
    snapshot: Snapshot | None = None
    """Snapshot from which it was read."""
    gathers: int = 0
    """Number of the copy, where the tensors were gathered from several processes just now."""

    def tensors(self) -> list[Tensor]:
        return [*self.slow, *(tensor for name in sorted(self.extra) for tensor in self.extra[name])]

    def version(self) -> tuple[object, ...]:
        """Return a value that stays equal while nothing in the state changes: torch counts the
        changes of every tensor.
        """
        changes = tuple((id(t), t._version) for t in self.tensors())
        return self.round, tuple(self.applied), tuple(sorted(self.extra)), self.gathers, changes


@dataclass(frozen=True)
class Snapshot:
    """State as bytes (float32 values, in memory or in a file) and the digests of its chunks, as
    ``header`` declares them.
    """

    header: StateHeader
    content: Tensor | Spool
    digests: bytes

    @property
    def id(self) -> bytes:
        return snapshot_id(self.header)

    def chunk(self, number: int) -> memoryview:
        """Return the bytes of one chunk. OSError if the disk fails."""
        size = chunk_size(self.header.nbytes, number)
        return read_at(self.content, number * CHUNK, size)


def snapshot_id(header: StateHeader) -> bytes:
    return hashlib.sha256(pack(header)).digest()


def chunks_in(nbytes: int) -> int:
    return -(-nbytes // CHUNK)


def chunk_size(nbytes: int, chunk: int) -> int:
    """Return the bytes of one chunk of ``nbytes``; only the last is shorter than 1 MiB."""
    return min(CHUNK, nbytes - chunk * CHUNK)


def read_at(content: Tensor | Spool, offset: int, nbytes: int) -> memoryview:
    """Return ``nbytes`` bytes of a snapshot's content from ``offset`` on.

    OSError if it is in a file and the disk fails.
    """
    return (
        content.read(offset, nbytes)
        if isinstance(content, Spool)
        else content.numpy().data[offset : offset + nbytes]
    )


def digests_of(content: Tensor | Spool) -> bytes:
    """Return the BLAKE3 digests of all chunks, one after another. OSError if the disk fails."""
    nbytes = content.nbytes
    sizes = ((number * CHUNK, chunk_size(nbytes, number)) for number in range(chunks_in(nbytes)))
    return b"".join(blake3(read_at(content, offset, size)).digest() for offset, size in sizes)


def encode(state: State) -> Tensor | Spool:
    """Return a copy of the whole state as flat float32 bytes, in a file if it is large and there is
    room.
    """
    payload = BorrowedPayload(OnDemand(state.tensors()), FLOAT32)
    spool = spool_for(payload.nbytes)
    offset = 0
    if spool is None:
        return payload.whole()
    for block in payload.blocks():
        spool.write(offset, block)
        offset += len(block)
    return spool


def make(state: State, payload: Tensor | Spool, names: bytes = b"") -> Snapshot:
    """Return the snapshot of ``state``, whose `encode` is ``payload``.

    Hashes all of it: do not call it on the host's loop.

    ``names``: packed ones of the parameters.
    """
    digests = digests_of(payload)
    header = StateHeader(
        round=state.round,
        nbytes=payload.nbytes,
        shapes=tuple(tuple(tensor.shape) for tensor in state.slow),
        dtype="float32",
        sha256=hashlib.sha256(digests).digest(),
        extra=tuple(
            (name, shapes_digest([tuple(t.shape) for t in state.extra[name]]))
            for name in sorted(state.extra)
        ),
        names=names,
        applied=struct.pack(f"<{len(state.applied)}Q", *(round + 1 for round in state.applied)),
    )
    return Snapshot(header, payload, digests)


def nothing(shapes: tuple[Shape, ...], names: bytes = b"") -> StateHeader:
    """Return a header that declares the model's shapes and packed names, and whose bytes nobody
    holds.
    """
    return StateHeader(
        round=0,
        nbytes=FLOAT32.nbytes(shapes),
        shapes=shapes,
        dtype="float32",
        sha256=bytes(32),
        names=names,
    )


def read(snapshot: Snapshot, extra: Mapping[str, Sequence[Shape]]) -> State:
    """Return the state in a snapshot that fits (`StateQuery.check`); its tensors are views into the
    content.
    """
    header = snapshot.header
    content = snapshot.content
    parts = [header.shapes, *(extra[name] for name, _ in header.extra)]
    at = 0
    found: list[Sequence[Tensor]] = []
    for shapes in parts:
        size = FLOAT32.nbytes(shapes)
        if isinstance(content, Spool):
            found.append(SpooledTensors(content, at, shapes))
        else:
            found.append(FLOAT32.decode(content[at : at + size], shapes))
        at += size
    shared = {name: tensors for (name, _), tensors in zip(header.extra, found[1:], strict=True)}
    applied = [round - 1 for (round,) in struct.iter_unpack("<Q", header.applied)]
    return State(header.round, found[0], shared, applied, snapshot)


def shapes_digest(shapes: Sequence[Shape]) -> bytes:
    return hashlib.sha256(pack_shapes(tuple(shapes))).digest()


@dataclass
class _Held:
    """A snapshot in the cache.

    ``readers``: streams on which it is being downloaded; ``read``: a download of it has ended.
    """

    snapshot: Snapshot
    asked: float  # time of the last request for it
    readers: int = 0
    read: bool = False

    def busy(self, now: float) -> bool:
        return self.readers > 0 or (not self.read and now - self.asked <= BUSY_S)


class SnapshotCache:
    """Cache of snapshots that this node hands out: at most two, each dropped two minutes after its
    last request. Thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[bytes, _Held] = {}

    def put(self, snapshot: Snapshot) -> None:
        """Hand out a snapshot from now on; beyond two, drop the least recently requested, if
        possible one that nobody downloads.
        """
        with self._lock:
            now = self._clock()
            others = [id for id in self._held if id != snapshot.id]
            for id in sorted(
                others, key=lambda id: (self._held[id].busy(now), self._held[id].asked)
            )[: len(others) + 1 - KEPT]:
                del self._held[id]
            self._held.setdefault(snapshot.id, _Held(snapshot, now)).asked = now

    def get(self, id: bytes) -> Snapshot | None:
        """Return the snapshot with this id, and mark it as requested."""
        with self._lock:
            found = self._held.get(id)
            if found is None:
                return None
            found.asked = self._clock()
            return found.snapshot

    @contextmanager
    def read(self, id: bytes) -> Iterator[None]:
        """Return a block in which the snapshot, if it is here, counts as being downloaded."""
        with self._lock:
            found = self._held.get(id)
            if found is not None:
                found.readers += 1
        try:
            yield
        finally:
            with self._lock:
                if found is not None:
                    found.readers = found.readers - 1
                    found.read = True

    def expire(self) -> None:
        with self._lock:
            now = self._clock()
            self._held = {
                id: held for id, held in self._held.items() if now - held.asked <= UNUSED_S
            }

    def full(self) -> bool:
        """Return whether one more would drop a snapshot that is being downloaded, or is about to
        be.
        """
        with self._lock:
            now = self._clock()
            return sum(held.busy(now) for held in self._held.values()) >= KEPT

    def newest(self, since: int) -> Snapshot | None:
        with self._lock:
            found = [
                held.snapshot for held in self._held.values() if held.snapshot.header.round >= since
            ]
        return max(found, key=lambda snapshot: snapshot.header.round, default=None)


CHUNKS_PROTOCOL = "/shoal/pieces/1"
SMALL_S = 10.0  # seconds for one small message, or without a byte
CHUNK_S = 60.0  # seconds for one chunk; more while it moves (`chunk_s`)
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
        with ExitStack() as download:
            reading: bytes | None = None
            left: int | None = (
                None  # bytes: a stream is for one download, which is what `models_per_hour` counts
            )
            patience = IDLE_S
            while True:
                # When the caller has all it wants it ends the stream, and this raises NetworkError.
                request = unpack(await stream.receive(ChunkRequest.LIMIT, patience), ChunkRequest)
                snapshot = (
                    self._kept.get(request.snapshot) if request.swarm == self._swarm else None
                )
                data = None if snapshot is None else _chunk(snapshot, request.chunk)
                if snapshot is None or data is None:
                    await stream.send(
                        pack(ChunkReply(nbytes=0, reason="this peer does not hold it")), SMALL_S
                    )
                    continue
                left = (
                    snapshot.header.nbytes + len(snapshot.digests) if left is None else left
                ) - len(data)
                if left < 0:
                    raise NetworkError(
                        f"peer {short(stream.peer_id)} asked for more than the model on one "
                        "stream.",
                        "refused",
                    )
                if (
                    request.chunk is not None and request.snapshot != reading
                ):  # the digests are fetched before the download begins
                    download.close()
                    download.enter_context(self._kept.read(reading := request.snapshot))
                # Of what is sent much may still be in buffers before a slow link.
                patience = IDLE_S + chunk_s(len(data))
                await stream.send(pack(ChunkReply(nbytes=len(data))), SMALL_S)
                now = asyncio.get_running_loop().time()
                await stream.swap(
                    data,
                    memoryview(bytearray()),
                    chunk_timeout=SMALL_S,
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
        self._closed = False

    async def take(self, chunk: int | None, room: memoryview) -> None:
        """Fill ``room``, which has the size of the chunk, with what the peer sends for it,
        unchecked. None: the list of digests.

        Raises NotHeldError; NetworkError, MessageError if it cannot be reached, is too slow, or
        violates the protocol.
        """
        if self._stream is None:
            self._stream = await self._host.open(
                self.peer, CHUNKS_PROTOCOL, addresses=self._addresses, timeout=SMALL_S
            )
            if self._closed:
                self.close()
                raise NetworkError("the download is over.")
        stream = self._stream
        await stream.send(
            pack(ChunkRequest(swarm=self._swarm, snapshot=self._id, chunk=chunk)), SMALL_S
        )
        reply = unpack(await stream.receive(ChunkReply.LIMIT, SMALL_S), ChunkReply)
        if not reply.nbytes:
            raise NotHeldError(f"peer {short(self.peer)} does not hold these weights any more.")
        if reply.nbytes != len(room):
            raise MessageError(
                f"peer {short(self.peer)} announced a chunk of {reply.nbytes} bytes where "
                f"{len(room)} fit."
            )
        now = asyncio.get_running_loop().time()
        await stream.swap(
            NOTHING,
            room,
            chunk_timeout=SMALL_S,
            deadline=now + CHUNK_S,
            longest=now + chunk_s(len(room)),
        )

    def close(self) -> None:
        self._closed = True
        if self._stream is not None:
            self._stream.abort()
            self._stream = None


LANES = 2  # streams to one source
TWICE = 2  # sources that are asked for the same chunk when there is nothing else to ask for
MAX_SOURCES = 8

Peer = tuple[str, Sequence[str]]
"""Peer id and addresses."""


def chunk_s(nbytes: int) -> float:
    """Return the seconds that a chunk may take while it moves: all streams of its download may
    share the slowest link.
    """
    return LANES * MAX_SOURCES * extension_s(nbytes)


class ChunkPlan:
    """Assignment of missing chunks to lanes, without any network.

    Each missing chunk is asked of one lane at a time. When all are assigned, the rest are also
    asked of a second source, so that one slow source does not delay the download.
    """

    def __init__(self, missing: Iterable[int]) -> None:
        self._free = deque(missing)
        self._asked: dict[
            int, list[object]
        ] = {}  # lanes that were asked for each chunk, in the order in which they were asked
        self._source: dict[object, object] = {}  # the source of each lane

    @property
    def done(self) -> bool:
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
                chunk
                for chunk, lanes in self._asked.items()
                if len(lanes) < TWICE and source not in map(self._source.get, lanes)
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
    room = bytearray(DIGEST * chunks_in(header.nbytes))
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
        self.plan, self.wrong = plan, set[str]()
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
        async with running(
            self._whole(), *(self._lane(peer) for _ in range(LANES) for peer in sources)
        ) as (whole, *lanes):
            pending: set[asyncio.Future[None]] = {whole, *lanes}
            while not whole.done() and len(pending) > 1:
                finished, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for one in finished:
                    one.result()  # what a sink raises, a full disk for instance
            # A lane that loses its cancellation (``wait_for`` before Python 3.12) would take one
            # more chunk, which may take an hour.
            for source in self._sources:
                source.close()
        if not self.plan.done:
            raise NetworkError(
                f"the peers that hold the weights are gone with {self.plan.left} chunks missing."
            )

    async def _whole(self) -> None:
        while not self.plan.done:
            await self._change.wait()

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
                if blake3(room).digest() != self._digests[chunk * DIGEST : (chunk + 1) * DIGEST]:
                    self.wrong.add(peer)
                    raise MessageError(
                        f"peer {short(peer)} served a chunk of the weights that does not match its "
                        "digest: it is not asked "
                        "again, and the chunk is fetched elsewhere."
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
