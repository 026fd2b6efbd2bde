"""Snapshots: a swarm's state as immutable bytes named by a hash, and the cache of those that this node hands out.

The id is the SHA-256 of the header, which holds the hash of the list of the chunks' digests. A peer that knows the id can therefore
check every chunk, whatever its source, and peers that hold the same round's weights offer the same id without coordination.


Large snapshots lie in files without a name, so that handing weights out takes no main memory beside the system's cache.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor

from shoal.optim.codecs.base import FLOAT32, Shape
from shoal.optim.exchange.on_demand import OnDemand
from shoal.swarm.exchange.contribution import BorrowedPayload
from shoal.swarm.wire.digest import CHUNK
from shoal.swarm.wire.envelope import pack
from shoal.swarm.wire.fields import pack_shapes
from shoal.swarm.wire.state import StateHeader

LARGE = 16 << 20  # bytes from which on a snapshot is not held in memory
ON_DISK = Path("/var/tmp")  # the usual folder may lie in memory itself


class Spool:
    """File of ``nbytes`` bytes that is gone with the last that uses it. OSError if the disk has no room for it."""

    def __init__(self, nbytes: int) -> None:
        folder = ON_DISK if "TMPDIR" not in os.environ and os.access(ON_DISK, os.W_OK) else None
        self._file, self.nbytes = tempfile.TemporaryFile(prefix="shoal-", dir=folder, buffering=0), nbytes  # noqa: SIM115 (it is closed when it is gone)
        os.posix_fallocate(self._file.fileno(), 0, nbytes)

    def write(self, offset: int, data: memoryview) -> None:
        """Write ``data`` at ``offset``. OSError if the disk fails."""
        written = 0
        while written < len(data):
            written += os.pwrite(self._file.fileno(), data[written:], offset + written)

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Return the bytes at ``offset``. OSError if the disk fails."""
        return memoryview(os.pread(self._file.fileno(), nbytes, offset))

    def mapped(self) -> Tensor:
        """Return all bytes (uint8), mapped rather than read; changes stay in memory."""
        return torch.frombuffer(mmap.mmap(self._file.fileno(), self.nbytes, access=mmap.ACCESS_COPY), dtype=torch.uint8)


def spool_for(nbytes: int) -> Spool | None:
    """Return a file for a snapshot; None if it is to be in memory: it is small, or no disk takes it."""
    try:
        return Spool(nbytes) if nbytes >= LARGE and hasattr(os, "posix_fallocate") else None
    except OSError:
        return None


DIGEST = 32  # bytes of a chunk's BLAKE3
KEPT = 2  # snapshots that a node holds at most, each as large as its slow weights and shared state in float32
UNUSED_S = 120.0  # seconds after which a snapshot that nobody asks for is dropped
BUSY_S = 15.0  # seconds since the last request in which a snapshot counts as being downloaded


@dataclass(frozen=True)
class State:
    """State of a swarm: slow weights (float32, CPU) before round ``round``."""

    round: int
    slow: Sequence[Tensor]
    extra: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    """State that the source's rule shares beside them, such as DiLoCo's momentum; float32, by the rule's own names."""
    applied: Sequence[int] = ()
    """For each fragment the round whose outcome is in it; -1: none."""
    snapshot: Snapshot | None = None
    """Snapshot from which it was read."""
    gathers: int = 0
    """Number of the copy, where the tensors were gathered from several processes just now."""

    def version(self) -> tuple[object, ...]:
        """Return a value that stays equal while nothing in the state changes: torch counts the changes of every tensor."""
        tensors = [*self.slow, *(tensor for name in sorted(self.extra) for tensor in self.extra[name])]
        changes = tuple((id(t), t._version) for t in tensors)
        return self.round, tuple(self.applied), tuple(sorted(self.extra)), self.gathers, changes


@dataclass(frozen=True)
class Snapshot:
    """State as bytes (float32 values, in memory or in a file) and the digests of its chunks, as ``header`` declares them."""

    header: StateHeader
    content: Tensor | Spool
    digests: bytes

    @property
    def id(self) -> bytes:
        """SHA-256 of the header."""
        return snapshot_id(self.header)

    @property
    def payload(self) -> Tensor:
        """The bytes (uint8, flat); those of a file are mapped, and take memory while they are used."""
        return self.content if isinstance(self.content, Tensor) else self.content.mapped()

    def chunk(self, number: int) -> memoryview:
        """Return the bytes of one chunk. OSError if the disk fails."""
        size = chunk_size(self.header.nbytes, number)
        return read_at(self.content, number * CHUNK, size)


def snapshot_id(header: StateHeader) -> bytes:
    """Return the SHA-256 of the header, 32 bytes."""
    return hashlib.sha256(pack(header)).digest()


def chunks_in(nbytes: int) -> int:
    """Return how many chunks ``nbytes`` make."""
    return -(-nbytes // CHUNK)


def chunk_size(nbytes: int, chunk: int) -> int:
    """Return the bytes of one chunk of ``nbytes``; only the last is shorter than 1 MiB."""
    return min(CHUNK, nbytes - chunk * CHUNK)


def read_at(content: Tensor | Spool, offset: int, nbytes: int) -> memoryview:
    """Return ``nbytes`` bytes of a snapshot's content from ``offset`` on. OSError if it is in a file and the disk fails."""
    return content.read(offset, nbytes) if isinstance(content, Spool) else content.numpy().data[offset : offset + nbytes]


def digests_of(content: Tensor | Spool) -> bytes:
    """Return the BLAKE3 digests of all chunks, one after another. OSError if the disk fails."""
    nbytes = content.nbytes
    sizes = ((number * CHUNK, chunk_size(nbytes, number)) for number in range(chunks_in(nbytes)))
    return b"".join(blake3(read_at(content, offset, size)).digest() for offset, size in sizes)


def encode(state: State) -> Tensor | Spool:
    """Return a copy of the whole state as flat float32 bytes, in a file if it is large and there is room."""
    payload = BorrowedPayload(
        OnDemand([*state.slow, *(tensor for name in sorted(state.extra) for tensor in state.extra[name])]), FLOAT32
    )
    spool, offset = spool_for(payload.nbytes), 0
    if spool is None:
        return payload.whole()
    for block in payload.blocks():
        spool.write(offset, block)
        offset += len(block)
    return spool


def make(state: State, payload: Tensor | Spool) -> Snapshot:
    """Return the snapshot of ``state``, whose `encode` is ``payload``. Hashes all of it: do not call it on the host's loop."""
    digests = digests_of(payload)
    header = StateHeader(
        round=state.round,
        nbytes=payload.nbytes,
        shapes=tuple(tuple(tensor.shape) for tensor in state.slow),
        dtype="float32",
        sha256=hashlib.sha256(digests).digest(),
        extra=tuple((name, shapes_digest([tuple(t.shape) for t in state.extra[name]])) for name in sorted(state.extra)),
        applied=struct.pack(f"<{len(state.applied)}Q", *(round + 1 for round in state.applied)),
    )
    return Snapshot(header, payload, digests)


def nothing(shapes: tuple[Shape, ...]) -> StateHeader:
    """Return a header that declares the model's shapes, and whose bytes nobody holds."""
    return StateHeader(round=0, nbytes=FLOAT32.nbytes(shapes), shapes=shapes, dtype="float32", sha256=bytes(32))


def read(snapshot: Snapshot, extra: Mapping[str, Sequence[Shape]]) -> State:
    """Return the state in a snapshot that fits (`StateQuery.check`); its tensors are views into the payload."""
    header = snapshot.header
    names = [name for name, _ in header.extra]
    tensors = FLOAT32.decode(snapshot.payload, [*header.shapes, *(shape for name in names for shape in extra[name])])
    rest = iter(tensors[len(header.shapes) :])
    shared = {name: [next(rest) for _ in extra[name]] for name in names}
    applied = [round - 1 for (round,) in struct.iter_unpack("<Q", header.applied)]
    return State(header.round, tensors[: len(header.shapes)], shared, applied, snapshot)


def shapes_digest(shapes: Sequence[Shape]) -> bytes:
    """Return the SHA-256 of shapes as the wire has them."""
    return hashlib.sha256(pack_shapes(tuple(shapes))).digest()


class SnapshotCache:
    """Cache of snapshots that this node hands out: at most two, each dropped two minutes after its last request. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[bytes, tuple[Snapshot, float]] = {}

    def put(self, snapshot: Snapshot) -> None:
        """Hand out a snapshot from now on; beyond two, drop the least recently requested."""
        with self._lock:
            self._held[snapshot.id] = (snapshot, self._clock())
            while len(self._held) > KEPT:
                del self._held[min(self._held, key=lambda one: self._held[one][1])]

    def get(self, id: bytes) -> Snapshot | None:
        """Return the snapshot with this id, and mark it as requested."""
        with self._lock:
            found = self._held.get(id)
            if found is None:
                return None
            self._held[id] = (found[0], self._clock())
            return found[0]

    def expire(self) -> None:
        """Drop snapshots that nobody asks for."""
        with self._lock:
            now = self._clock()
            for id in [id for id, (_, asked) in self._held.items() if now - asked > UNUSED_S]:
                del self._held[id]

    def full(self) -> bool:
        """Return whether one more would drop a snapshot that is being downloaded."""
        with self._lock:
            now = self._clock()
            return sum(now - asked <= BUSY_S for _, asked in self._held.values()) >= KEPT

    def newest(self, since: int) -> Snapshot | None:
        """Return the snapshot of the latest round, if it is not before ``since``."""
        with self._lock:
            found = [snapshot for snapshot, _ in self._held.values() if snapshot.header.round >= since]
        return max(found, key=lambda snapshot: snapshot.header.round, default=None)
