"""A state of a swarm as bytes that nobody changes any more, known by a hash, and those that this node can hand out.

Its id is the SHA-256 of its header, which holds the hash of the list of the chunks' digests: so whoever knows the id can check
every chunk, whoever it comes from, and peers that hold the same round's weights state the same id without speaking to each other.
"""

from __future__ import annotations

import hashlib
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from blake3 import blake3
from torch import Tensor

from shoal.optim.codecs.base import FLOAT32, Shape
from shoal.swarm.wire.digest import CHUNK
from shoal.swarm.wire.fields import pack_shapes
from shoal.swarm.wire.member import pack
from shoal.swarm.wire.state import StateHeader

DIGEST = 32  # bytes of a chunk's BLAKE3
KEPT = 2  # snapshots that a node holds at most, each as large as its slow weights and shared state in float32
UNUSED_S = 120.0  # seconds after which one that nobody asks for goes
BUSY_S = 15.0  # seconds since the last question in which somebody is taken to be downloading it


@dataclass(frozen=True)
class State:
    """Where a swarm is: slow weights (float32, CPU) before round ``round``."""

    round: int
    slow: Sequence[Tensor]
    extra: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    """What the giver's rule shares beside them, DiLoCo's momentum for instance; float32, under the rule's own names."""
    applied: Sequence[int] = ()
    """For each fragment the round whose outcome is in it; -1: none."""
    snapshot: Snapshot | None = None
    """From which it was read."""

    def version(self) -> tuple[object, ...]:
        """Equal as long as nothing in it has changed: torch counts the changes of every tensor."""
        tensors = [*self.slow, *(tensor for name in sorted(self.extra) for tensor in self.extra[name])]
        return self.round, tuple(self.applied), tuple(sorted(self.extra)), tuple((id(t), t._version) for t in tensors)


@dataclass(frozen=True)
class Snapshot:
    """``payload`` (uint8, flat, float32 values) and the digests of its chunks, as ``header`` states them."""

    header: StateHeader
    payload: Tensor
    digests: bytes

    @property
    def id(self) -> bytes:
        """The SHA-256 of the header."""
        return snapshot_id(self.header)


def snapshot_id(header: StateHeader) -> bytes:
    """32 bytes."""
    return hashlib.sha256(pack(header)).digest()


def chunks_in(nbytes: int) -> int:
    """Chunks of so many bytes."""
    return -(-nbytes // CHUNK)


def chunk_size(nbytes: int, chunk: int) -> int:
    """Bytes of one chunk of ``nbytes``; only the last is shorter than 1 MiB."""
    return min(CHUNK, nbytes - chunk * CHUNK)


def digests_of(payload: memoryview) -> bytes:
    """BLAKE3 of each chunk, one after another."""
    return b"".join(blake3(payload[at : at + CHUNK]).digest() for at in range(0, len(payload), CHUNK))


def encode(state: State) -> Tensor:
    """All of a state as flat float32 bytes: a copy."""
    return FLOAT32.encode([*state.slow, *(tensor for name in sorted(state.extra) for tensor in state.extra[name])])


def make(state: State, payload: Tensor) -> Snapshot:
    """The snapshot of ``state``, whose ``encode`` is ``payload``. Hashes it all: not for the host's loop."""
    digests = digests_of(payload.numpy().data)
    header = StateHeader(
        round=state.round,
        nbytes=payload.numel(),
        shapes=tuple(tuple(tensor.shape) for tensor in state.slow),
        dtype="float32",
        sha256=hashlib.sha256(digests).digest(),
        extra=tuple((name, shapes_digest([tuple(t.shape) for t in state.extra[name]])) for name in sorted(state.extra)),
        applied=struct.pack(f"<{len(state.applied)}Q", *(round + 1 for round in state.applied)),
    )
    return Snapshot(header, payload, digests)


def nothing(shapes: tuple[Shape, ...]) -> StateHeader:
    """A header that says which shapes the model has, and of which nobody holds the bytes."""
    return StateHeader(round=0, nbytes=FLOAT32.nbytes(shapes), shapes=shapes, dtype="float32", sha256=bytes(32))


def read(snapshot: Snapshot, extra: Mapping[str, Sequence[Shape]]) -> State:
    """The state in a snapshot that fits (``shoal.swarm.state.selection.check``); its tensors are views into the payload."""
    header = snapshot.header
    names = [name for name, _ in header.extra]
    tensors = FLOAT32.decode(snapshot.payload, [*header.shapes, *(shape for name in names for shape in extra[name])])
    rest = iter(tensors[len(header.shapes) :])
    shared = {name: [next(rest) for _ in extra[name]] for name in names}
    applied = [round - 1 for (round,) in struct.iter_unpack("<Q", header.applied)]
    return State(header.round, tensors[: len(header.shapes)], shared, applied, snapshot)


def shapes_digest(shapes: Sequence[Shape]) -> bytes:
    """SHA-256 of shapes as the wire has them."""
    return hashlib.sha256(pack_shapes(tuple(shapes))).digest()


class SnapshotCache:
    """The snapshots that this node hands out: at most two, none that nobody has asked for in the last two minutes.

    For any thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[bytes, tuple[Snapshot, float]] = {}

    def put(self, snapshot: Snapshot) -> None:
        """Hand it out from now on; for it goes whichever was asked for longest ago."""
        with self._lock:
            self._held[snapshot.id] = (snapshot, self._clock())
            while len(self._held) > KEPT:
                del self._held[min(self._held, key=lambda one: self._held[one][1])]

    def get(self, id: bytes) -> Snapshot | None:
        """The snapshot with this id, which is in use then."""
        with self._lock:
            found = self._held.get(id)
            if found is None:
                return None
            self._held[id] = (found[0], self._clock())
            return found[0]

    def expire(self) -> None:
        """Let go of what nobody asks for."""
        with self._lock:
            now = self._clock()
            for id in [id for id, (_, asked) in self._held.items() if now - asked > UNUSED_S]:
                del self._held[id]

    def full(self) -> bool:
        """Whether another one would take away what somebody is downloading."""
        with self._lock:
            now = self._clock()
            return sum(now - asked <= BUSY_S for _, asked in self._held.values()) >= KEPT

    def newest(self, since: int) -> Snapshot | None:
        """That of the latest round, if it is not before ``since``."""
        with self._lock:
            found = [snapshot for snapshot, _ in self._held.values() if snapshot.header.round >= since]
        return max(found, key=lambda snapshot: snapshot.header.round, default=None)
