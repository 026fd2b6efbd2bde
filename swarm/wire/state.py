"""Messages by which a snapshot of the weights is asked for and handed out."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shoal.swarm.wire.envelope import KIB, Message
from shoal.swarm.wire.fields import (
    MAX_EXTRA,
    Bytes,
    Count,
    Digest,
    Reason,
    Sha256,
    Shapes,
    SwarmId,
    Token,
)


class StateRequest(Message):
    """Asks for a snapshot of a peer's slow weights, to start from them; ``astray``: or because the sender's own have drifted away.

    ``since``: of this round or a later one. ``round``: that of the sender's own weights if they have drifted.
    """

    KIND, VERSION = "state-request", 3
    swarm: SwarmId
    model: Digest
    astray: bool = False
    round: Count = 0
    since: Count = 0


class StateHeader(Message):
    """A snapshot of ``nbytes`` bytes: the slow weights, of ``shapes``, and then the rule's shared state. Its SHA-256 is its id.

    ``sha256``: of the list of the BLAKE3 digests of its chunks. ``extra``: for each part of the shared state, in order, its name
    and the SHA-256 of its shapes as the wire has them. ``applied``: for each fragment, as a little-endian u64, one more than the
    round whose outcome is in it. Nothing in it differs between peers that hold the same.
    """

    KIND, VERSION, LIMIT = "state-header", 3, 1024 * KIB
    round: Count
    nbytes: Bytes
    shapes: Shapes
    dtype: Token
    sha256: Sha256
    extra: Annotated[tuple[tuple[Token, Sha256], ...], Field(max_length=MAX_EXTRA)] = ()
    applied: Annotated[bytes, Field(max_length=32 * KIB)] = b""


class ChunkRequest(Message):
    """Asks for a piece of the snapshot with that id: chunk number ``chunk``, or (None) the list of the digests of all chunks."""

    KIND = "piece-request"
    swarm: SwarmId
    snapshot: Sha256
    chunk: Count | None


class ChunkReply(Message):
    """How many bytes follow; 0: they are not held, and why."""

    KIND, LIMIT = "piece-reply", 4 * KIB
    nbytes: Bytes
    reason: Reason = ""
