"""The messages that request and deliver a snapshot of the weights."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shoal.swarm.wire.envelope import KIB, Message
from shoal.swarm.wire.fields import MAX_EXTRA, Bytes, Count, Digest, Reason, Sha256, Shapes, SwarmId, Token


class StateRequest(Message):
    """Request for a snapshot of a peer's slow weights, to start from them; ``astray``: because the sender's own have diverged.

    ``since``: of this round or a later one. ``round``: that of the sender's own weights if they have diverged.
    """

    KIND = "state-request"
    swarm: SwarmId
    model: Digest
    astray: bool = False
    round: Count = 0
    since: Count = 0


class StateHeader(Message):
    """Header of a snapshot: ``nbytes`` bytes of slow weights, of ``shapes``, and the rule's shared state. Its SHA-256 is its id.

    ``sha256``: of the list of the BLAKE3 digests of its chunks. ``extra``: for each part of the shared state, in order, its name
    and the SHA-256 of its packed shapes. ``applied``: for each fragment, as a little-endian u64, one more than the round whose
    outcome is in it. The header is the same on all peers that hold the same snapshot.
    """

    KIND, LIMIT = "state-header", 1024 * KIB
    round: Count
    nbytes: Bytes
    shapes: Shapes
    dtype: Token
    sha256: Sha256
    extra: Annotated[tuple[tuple[Token, Sha256], ...], Field(max_length=MAX_EXTRA)] = ()
    applied: Annotated[bytes, Field(max_length=32 * KIB)] = b""


class ChunkRequest(Message):
    """Request for chunk number ``chunk`` of the snapshot with that id, or (None) for the list of the digests of all chunks."""

    KIND = "piece-request"
    swarm: SwarmId
    snapshot: Sha256
    chunk: Count | None


class ChunkReply(Message):
    """The number of bytes that follow; 0: the chunk is not held, for ``reason``."""

    KIND, LIMIT = "piece-reply", 4 * KIB
    nbytes: Bytes
    reason: Reason = ""
