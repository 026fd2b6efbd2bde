"""The record of a member in the directory, and the messages of: joining; an exchange between two
peers; one of a group, in the order in which they are sent; snapshots of the weights; and bootstrap
nodes (`shoal seed`), which list public swarms.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shoal.swarm.wire.envelope import (
    ENVELOPE,
    KIB,
    MAX_COUNT,
    MAX_EXTRA,
    MAX_NAMES,
    Address,
    Bytes,
    Count,
    Digest,
    Label,
    Message,
    Moment,
    Nonce,
    PeerId,
    Rate,
    Real,
    Reason,
    Seconds,
    Sha256,
    Shapes,
    Share,
    ShortLabel,
    Sketch,
    SwarmId,
    Token,
    Version,
    Weight,
)
from shoal.swarm.wire.record import MAX_MISSING, Faults, LinkUse, State, UnusedReason


class MemberEnd(BaseModel):
    """What a member's last average came to: with how many ``members`` (itself included; 0: none),
    the first ``names`` of the others, and its held-out loss, nats, before and after.

    ``refused``: it kept its own weights, because the mean was worse.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
    members: Count
    names: Annotated[tuple[ShortLabel, ...], Field(max_length=MAX_MISSING)] = ()
    loss_before: Real | None = None
    loss_after: Real | None = None
    refused: bool = False


class Member(Message, LinkUse, Faults):
    """One peer's entry in the directory.

    Its fields are those of `shoal.swarm.wire.record`, all of two groups and a part of others, and
    lie flat: with the names of groups the largest would not fit. What the node trains and where it
    is in the swarm is here alone.
    """

    KIND = "member"
    VERSION = 3
    LIMIT = 5 * KIB
    AUTHOR = "peer"
    swarm: SwarmId
    peer: PeerId
    name: Label
    addresses: Annotated[tuple[Address, ...], Field(max_length=8)]
    round: Count
    step: Count
    loss: Real | None
    """That of training, nats."""
    steps_per_s: Rate
    shard: Annotated[int, Field(ge=0, lt=MAX_COUNT)]
    shards: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    model: Digest
    state: State
    issued: Moment
    """Unix seconds."""
    version: Version
    admission: Annotated[bytes, Field(max_length=KIB)] = b""
    """Its packed admission, in a swarm that is by invitation only."""
    exchange_s: Seconds = 0.0
    round_wait_s: Seconds = 0.0
    lag_steps: Count = 0
    lag_auto: bool = False
    late: Count = 0
    tokens_per_s: Rate = 0.0
    mfu: Share | None = None
    unused: tuple[Share, UnusedReason] | None = None
    """The share of groups of rollouts that were of no use to it, and the most frequent reason."""
    sketch: Sketch | None = None
    """The round and fragment that it finished last, and a sketch of its slow weights then.

    Only where the method keeps them equal on all peers.
    """
    change: Count = 0
    """Number of the newest `shoal.swarm.changes.Change` that it holds; 0: none."""
    finished: bool = False
    end: MemberEnd | None = None
    """What that came to, in the record with which it leaves; a node then states no
    ``missing_names`` and no ``sketch``, for which there may be no room.
    """

    @model_validator(mode="after")
    def _shard_exists(self) -> Member:
        if self.shard >= self.shards:
            raise ValueError("shard must be below shards")
        return self


class ManifestRequest(Message):
    """Request for the signed manifest of the peer's swarm."""

    KIND = "manifest-request"
    swarm: SwarmId


class ManifestReply(Message):
    """The sealed manifest, or None and the reason."""

    KIND = "manifest-reply"
    LIMIT = 64 * KIB
    manifest: Annotated[bytes, Field(max_length=60 * KIB)] | None
    swarm: SwarmId
    reason: Reason = ""


class AdmissionReply(Message):
    """The packed `Admission` (`shoal.swarm.access.invitation`) of the answering node; or the reason
    why the caller is refused.
    """

    KIND = "admission-reply"
    LIMIT = 4 * KIB
    admission: Annotated[bytes, Field(max_length=KIB)] = b""
    reason: Reason = ""


MAX_REFUSED = 4096 * KIB
Refused = Annotated[bytes, Field(max_length=MAX_REFUSED)]
"""The blocks of the receiver's contribution that the sender refused
(`shoal.optim.codecs.pair_message.Reading.bits`).
"""


class Offer(Message):
    """Offer of an exchange: a description of the payload, ``nbytes`` encoded bytes with digest
    ``sha256``.
    """

    KIND = "offer"
    LIMIT = 1024 * KIB
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

    KIND = "answer"
    LIMIT = 4 * KIB
    verdict: Literal["accept", "wait", "busy", "passed", "refuse"]
    reason: Reason = ""
    round: Count


class Ready(Message):
    """Message that the sender holds the whole verified contribution of its partner."""

    KIND = "ready"
    VERSION = 2
    LIMIT = MAX_REFUSED + KIB
    nonce: Nonce
    sha256: Sha256
    refused: Refused = b""


class Commit(Message):
    """Decision to apply the exchange on both sides."""

    KIND = "commit"
    VERSION = 2
    LIMIT = MAX_REFUSED + KIB
    nonce: Nonce
    refused: Refused = b""


class Abort(Message):
    """Decision that neither side applies the exchange."""

    KIND = "abort"
    LIMIT = 4 * KIB
    nonce: Nonce
    reason: Reason = ""


class OutcomeRequest(Message):
    """Question for the outcome of an exchange, after a confirmation was lost."""

    KIND = "outcome-request"
    nonce: Nonce


class OutcomeReply(Message):
    """The outcome of the exchange on the replying side."""

    KIND = "outcome-reply"
    VERSION = 2
    LIMIT = MAX_REFUSED + KIB
    outcome: Literal["committed", "aborted", "unknown"]
    refused: Refused = b""


MAX_GROUP = 64  # members, each a bit of one number
# That a swarm may ask for: of several groups one may be larger by one.
LARGEST_GROUP = MAX_GROUP - 1
MAX_PATIENCE = 3600.0  # seconds

SIGNED_AVERAGE = 2 + ENVELOPE + 192
"""Bytes of a sealed ``GroupAverage`` behind its length, at most."""
Way = Literal["gather", "allreduce", "butterfly"]
"""How a group reduces (`shoal.swarm.exchange.group.reduction`)."""
Places = Annotated[int, Field(ge=0, lt=2**MAX_GROUP)]
"""A set of members: bit n stands for the n-th in the order of peer ids."""


class GroupReady(Message):
    """Signed description of the sender's contribution to a round, for its leader and then its
    group; ``patience`` in seconds.

    ``sketch``: that of the round that it finished last, as in its
    `shoal.swarm.wire.messages.Member`, which may arrive too late.
    """

    KIND = "group-ready"
    swarm: SwarmId
    round: Count
    fragment: Count
    model: Digest
    codec: Token
    shapes: Sha256
    nbytes: Bytes
    weight: Weight
    sha256: Sha256
    patience: Annotated[float, Field(ge=0, le=MAX_PATIENCE)]
    nonce: Nonce
    sketch: Sketch | None = None


class GroupReceipt(Message):
    """The leader's answer to a ready message, and a member's to a probe.

    ``passed``: go to ``round``. ``elsewhere``: the sender itself waits at another leader, at
    ``addresses``; may also follow later, as ``passed`` may, of what ``leader`` said.
    """

    KIND = "group-receipt"
    LIMIT = 4 * KIB
    verdict: Literal["noted", "passed", "elsewhere", "busy", "refuse"]
    reason: Reason = ""
    round: Count
    leader: PeerId | None = None
    addresses: Annotated[tuple[Address, ...], Field(max_length=8)] = ()


class GroupProbe(Message):
    """Signed question of a leader to a member that is missing in a round: where it is.

    The receipt in answer says ``noted`` if it may still come.
    """

    KIND = "group-probe"
    swarm: SwarmId
    round: Count
    fragment: Count


class GroupAlive(Message):
    """Heartbeat of either side while it has nothing else to send, so that silence means a stopped
    process or a dead link.
    """

    KIND = "group-alive"


class GroupFormed(Message):
    """The leader's message to a member of its group: the signed ready messages of all, each after
    its length as two bytes.

    ``alone``: no other member was ready. A second such message calls the first attempt off and asks
    for another.
    """

    KIND = "group-formed"
    LIMIT = MAX_GROUP * (KIB + ENVELOPE + 2) + KIB
    nonce: Nonce
    reduction: Way
    alone: bool
    members: Annotated[bytes, Field(max_length=MAX_GROUP * (KIB + ENVELOPE + 2))]


class GroupLost(Message):
    """The leader's list of members that died since the group was formed, so that nobody waits for
    their data.
    """

    KIND = "group-lost"
    nonce: Nonce
    lost: Places


class GroupHello(Message):
    """Opening of the stream between two members over which they exchange payloads."""

    KIND = "group-hello"
    nonce: Nonce


class GroupAverage(Message):
    """Signed digest of the encoded average of a share that its owner sends to all members of its
    group, before the average itself.
    """

    KIND = "group-average"
    swarm: SwarmId
    nonce: Nonce
    sha256: Sha256


class GroupReport(Message):
    """A member's report of the contributions that it holds whole; after an all-reduce: all or
    none.

    ``averages``: after one with encoded averages, the signed digest of each, after its length as
    two bytes, in the order of their owners.
    """

    KIND = "group-report"
    LIMIT = MAX_GROUP * SIGNED_AVERAGE + KIB
    nonce: Nonce
    held: Places
    averages: Annotated[bytes, Field(max_length=MAX_GROUP * SIGNED_AVERAGE)] = b""


class GroupDecision(Message):
    """Signed decision of the leader: the members whose contributions make the mean.

    0: nobody's, the round is without a mean. ``averages``: the SHA-256 of those in all reports.
    """

    KIND = "group-decision"
    swarm: SwarmId
    nonce: Nonce
    mean: Places
    averages: Sha256 | None = None


class GroupQuestion(Message):
    """Question to the leader or another member for the decision, after the channel to the leader
    broke.
    """

    KIND = "group-question"
    nonce: Nonce


class GroupReply(Message):
    """The sealed decision, from the leader or a member that received it; None if the replying side
    does not have it.
    """

    KIND = "group-reply"
    LIMIT = 2 * KIB
    decision: Annotated[bytes, Field(max_length=KIB + ENVELOPE)] | None


class StateRequest(Message):
    """Request for a snapshot of a peer's slow weights, to start from them; ``astray``: because the
    sender's own have diverged.

    ``since``: of this round or a later one. ``round``: that of the sender's own weights if they
    have diverged.
    """

    KIND = "state-request"
    swarm: SwarmId
    model: Digest
    astray: bool = False
    round: Count = 0
    since: Count = 0


class StateHeader(Message):
    """Header of a snapshot: ``nbytes`` bytes of slow weights, of ``shapes``, and the rule's shared
    state. Its SHA-256 is its id.

    ``sha256``: of the list of the BLAKE3 digests of its chunks. ``extra``: for each part of the
    shared state, in order, its name and the SHA-256 of its packed shapes. ``names``: of the
    parameters, as `shoal.swarm.wire.envelope.pack_names` packs them; empty if they are too long.
    ``applied``: for each fragment, as a little-endian u64, one more than the round whose outcome is
    in it. The header is the same on all peers that hold the same snapshot.
    """

    KIND = "state-header"
    VERSION = 2
    LIMIT = 1024 * KIB
    round: Count
    nbytes: Bytes
    shapes: Shapes
    dtype: Token
    sha256: Sha256
    extra: Annotated[tuple[tuple[Token, Sha256], ...], Field(max_length=MAX_EXTRA)] = ()
    names: Annotated[bytes, Field(max_length=MAX_NAMES)] = b""
    applied: Annotated[bytes, Field(max_length=32 * KIB)] = b""


class ChunkRequest(Message):
    """Request for chunk number ``chunk`` of the snapshot with that id, or (None) for the list of
    the digests of all chunks.
    """

    KIND = "piece-request"
    swarm: SwarmId
    snapshot: Sha256
    chunk: Count | None


class ChunkReply(Message):
    """The number of bytes that follow; 0: the chunk is not held, for ``reason``."""

    KIND = "piece-reply"
    LIMIT = 4 * KIB
    nbytes: Bytes
    reason: Reason = ""


SEED_PROTOCOL = "/shoal/seed/1"
SEEN_PROTOCOL = "/shoal/seen/1"
GOSSIP_PROTOCOL = "/shoal/gossip/1"
MAX_NAMED = 8  # members that a bootstrap node names at once
Record = Annotated[bytes, Field(max_length=Member.LIMIT + ENVELOPE)]


class SeedRequest(Message):
    """Request for members of a swarm; ``record``: the sender's own sealed `Member`, by which others
    may find it.
    """

    KIND = "seed-request"
    LIMIT = 8 * KIB
    swarm: SwarmId
    record: Record | None = None


class SeedReply(Message):
    """Sealed `Member` records of others; ``reason``: why the sender's own was not noted, if it was
    not.
    """

    KIND = "seed-reply"
    LIMIT = 48 * KIB
    members: Annotated[tuple[Record, ...], Field(max_length=MAX_NAMED)] = ()
    reason: Reason = ""


SWARMS_PROTOCOL = "/shoal/swarms/1"
MAX_LISTED = 4  # swarms in one reply
MAX_CONTACTS = 2  # members of each that are named with it
MAX_MANIFEST = 12 * KIB  # bytes of a sealed manifest that is announced


class Announcement(Message):
    """What a member says of its public swarm, for people who look for one; ``issued`` in Unix
    seconds.

    ``manifest``: the swarm's sealed manifest, whose hash is ``swarm``. The rest is as the member
    ``peer`` says: ``params``, the number of parameters; ``round_bytes``, bytes that a node sends in
    a round; ``memory``, bytes of main memory that averaging takes beyond training alone, 0 where it
    was not measured; ``device``, on what it computes: cpu, cuda, xpu or mps.
    """

    KIND = "announcement"
    LIMIT = 13 * KIB
    AUTHOR = "peer"
    swarm: SwarmId
    peer: PeerId
    manifest: Annotated[bytes, Field(max_length=MAX_MANIFEST)]
    params: Count
    round_bytes: Bytes
    memory: Bytes
    device: ShortLabel
    issued: Moment


Sealed = Annotated[bytes, Field(max_length=Announcement.LIMIT + ENVELOPE)]


class SwarmsRequest(Message):
    """Request for public swarms whose ids come after ``after``, in the order of their ids.

    ``announcement``: the sender's own sealed `Announcement`, to be listed to others.
    """

    KIND = "swarms-request"
    LIMIT = 14 * KIB
    after: SwarmId | None = None
    announcement: Sealed | None = None


class ListedSwarm(Message):
    """A public swarm: its sealed `Announcement`, the number of members that the bootstrap node
    knows, and some of their records.
    """

    KIND = "listed-swarm"
    LIMIT = 24 * KIB
    announcement: Sealed
    peers: Count
    contacts: Annotated[tuple[Record, ...], Field(max_length=MAX_CONTACTS)] = ()


class SwarmsReply(Message):
    """Public swarms, each a packed `ListedSwarm`; ``more``: others come after the last.

    ``reason``: why the announcement was refused, if it was.
    """

    KIND = "swarms-reply"
    LIMIT = 98 * KIB
    swarms: Annotated[
        tuple[Annotated[bytes, Field(max_length=ListedSwarm.LIMIT)], ...],
        Field(max_length=MAX_LISTED),
    ] = ()
    more: bool = False
    reason: Reason = ""
