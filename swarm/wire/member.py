"""Every message of the exchange between two peers, of the directory and of a newcomer: its fields and its bounds.

Those of a group are in swarm/group_messages.py, the types of the fields in swarm/fields.py, packing and signing in swarm/wire.py.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from shoal.swarm.wire.envelope import ENVELOPE, KIB, M, Message, pack, seal, unpack, unseal
from shoal.swarm.wire.fields import (
    BLAMED,
    FAILURES,
    MAX_COUNT,
    Address,
    Bytes,
    Count,
    Digest,
    Failure,
    Label,
    Nonce,
    PeerId,
    Reason,
    Seconds,
    Sha256,
    Shapes,
    ShortLabel,
    SwarmId,
    Token,
    Weight,
)

# Whoever handles messages takes all of it from here.
__all__ = [
    "ENVELOPE", "KIB", "MAX_COUNT", "Abort", "AdmissionReply", "Answer", "Commit", "Digest", "Label", "M", "ManifestReply",
    "ManifestRequest", "Member", "Message", "Offer", "OutcomeReply", "OutcomeRequest", "PeerId", "PieceReply", "PieceRequest",
    "Ready", "StateHeader", "StateRequest", "pack", "seal", "unpack", "unseal",
]  # fmt: skip


MAX_MISSING = 4  # names of members that are missing
SKETCH = 4  # numbers that a sketch of the slow weights is made of
MAX_EXTRA = 8  # tensors for each parameter that a rule may share


class Member(Message):
    """One peer's entry in the directory; ``steps_per_s`` in inner steps, ``issued`` in Unix seconds, loss in nats.

    How its exchanges went (swarm/health.py): ``exchange_s``, seconds that moving the bytes of one took of late, and ``wait_s``,
    that training stood still for a round; ``failures`` among its last ``exchanges``, by kind, and with whom it met most of them
    (``blamed``). ``missing``: how many of ``missing_of`` members it lost sight of at about the same moment, and some of their names
    (swarm/absence.py). ``sketch``: the round and fragment that it finished last, and what its slow weights then come to
    (swarm/drift.py), where the method keeps them the same on all peers.
    ``admission``: its packed `swarm.invitation.Admission`, in a swarm that is by invitation only.
    """

    KIND, VERSION, LIMIT, AUTHOR = "member", 2, 5 * KIB, "peer"
    swarm: SwarmId
    peer: PeerId
    name: Label
    addresses: Annotated[tuple[Address, ...], Field(max_length=8)]
    round: Count
    step: Count
    loss: float | None
    steps_per_s: Annotated[float, Field(ge=0)]
    shard: Count
    shards: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    model: Digest
    state: Literal["waiting", "training", "leaving", "done"]
    issued: Annotated[float, Field(ge=0)]
    version: Label
    admission: Annotated[bytes, Field(max_length=KIB)] = b""
    exchange_s: Seconds = 0.0
    wait_s: Seconds = 0.0
    exchanges: Count = 0
    failures: Annotated[tuple[tuple[Failure, Count], ...], Field(max_length=len(FAILURES))] = ()
    blamed: Annotated[tuple[tuple[PeerId, Failure, Count], ...], Field(max_length=BLAMED)] = ()
    missing: Count = 0
    missing_of: Count = 0
    missing_within_s: Seconds = 0.0
    missing_names: Annotated[tuple[ShortLabel, ...], Field(max_length=MAX_MISSING)] = ()
    sketch: tuple[Count, Count, Annotated[tuple[float, ...], Field(min_length=SKETCH, max_length=SKETCH)]] | None = None

    @model_validator(mode="after")
    def _shard_exists(self) -> Member:
        if self.shard >= self.shards:
            raise ValueError("shard must be below shards")
        return self


class ManifestRequest(Message):
    """Asks a peer for the signed manifest of its swarm."""

    KIND = "manifest-request"
    swarm: SwarmId


class ManifestReply(Message):
    """The sealed manifest, or None and the reason why not."""

    KIND, LIMIT = "manifest-reply", 64 * KIB
    manifest: Annotated[bytes, Field(max_length=60 * KIB)] | None
    swarm: SwarmId
    reason: Reason = ""


class AdmissionReply(Message):
    """The packed `invitation.Admission` of the one who was shown the caller's; or why the caller is not let in."""

    KIND, LIMIT = "admission-reply", 4 * KIB
    admission: Annotated[bytes, Field(max_length=KIB)] = b""
    reason: Reason = ""


class Offer(Message):
    """Opens an exchange: what the sender is about to send, ``nbytes`` encoded bytes with digest ``sha256``."""

    KIND, VERSION, LIMIT = "offer", 2, 1024 * KIB
    swarm: SwarmId
    round: Count
    fragment: Count
    nbytes: Bytes
    shapes: Shapes
    dtype: Token
    codec: Token
    sha256: Sha256
    weight: Weight
    model: Digest
    nonce: Nonce


class Answer(Message):
    """The reply to an offer; ``round`` is the answering peer's own."""

    KIND, LIMIT = "answer", 4 * KIB
    verdict: Literal["accept", "wait", "busy", "passed", "refuse"]
    reason: Reason = ""
    round: Count


class Ready(Message):
    """The sender holds the whole verified contribution of its partner."""

    KIND = "ready"
    nonce: Nonce
    sha256: Sha256


class Commit(Message):
    """The exchange is decided: both sides apply it."""

    KIND = "commit"
    nonce: Nonce


class Abort(Message):
    """The exchange is off: neither side applies it."""

    KIND, LIMIT = "abort", 4 * KIB
    nonce: Nonce
    reason: Reason = ""


class OutcomeRequest(Message):
    """Asks how an exchange ended, after a confirm was lost."""

    KIND = "outcome-request"
    nonce: Nonce


class OutcomeReply(Message):
    """How the exchange ended on the replying side."""

    KIND = "outcome-reply"
    outcome: Literal["committed", "aborted", "unknown"]


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


class PieceRequest(Message):
    """Asks for a piece of the snapshot with that id: chunk number ``chunk``, or (None) the list of the digests of all chunks."""

    KIND = "piece-request"
    swarm: SwarmId
    snapshot: Sha256
    chunk: Count | None


class PieceReply(Message):
    """How many bytes follow; 0: they are not held, and why."""

    KIND, LIMIT = "piece-reply", 4 * KIB
    nbytes: Bytes
    reason: Reason = ""
