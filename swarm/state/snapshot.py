"""Snapshots: a swarm's state as immutable bytes named by a hash.

The id is the SHA-256 of the header, which holds the hash of the list of the chunks' digests. A peer
that knows the id can therefore check every chunk, whatever its source, and peers that hold the same
round's weights offer the same id without coordination.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from blake3 import blake3
from torch import Tensor

from shoal.optim.codecs.base import Shape
from shoal.optim.codecs.floats import FLOAT32
from shoal.optim.exchange.on_demand import OnDemand
from shoal.swarm.exchange.contribution import BorrowedPayload
from shoal.swarm.state.spool import Spool, SpooledTensors, spool_for
from shoal.swarm.wire.envelope import CHUNK, pack, pack_shapes
from shoal.swarm.wire.messages import StateHeader

DIGEST_BYTES = 32  # of a chunk's BLAKE3


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
