"""The messages of a group exchange, in the order in which they are sent."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shoal.swarm.wire.envelope import ENVELOPE, KIB, Message
from shoal.swarm.wire.fields import Address, Bytes, Count, Digest, Nonce, PeerId, Reason, Sha256, Sketch, SwarmId, Token, Weight

MAX_GROUP = 64  # members, each a bit of one number
LARGEST_GROUP = MAX_GROUP - 1  # that a swarm may ask for: of several groups one may be larger by one
MAX_PATIENCE = 3600.0  # seconds

Places = Annotated[int, Field(ge=0, lt=2**MAX_GROUP)]
"""A set of members: bit n stands for the n-th in the order of peer ids."""


class GroupReady(Message):
    """Signed description of the sender's contribution to a round, for its leader and then its group; ``patience`` in seconds.

    ``sketch``: that of the round that it finished last, as in its `shoal.swarm.wire.member.Member`, which may arrive too late.
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
    """The leader's answer to a ready message.

    ``passed``: go to ``round``. ``elsewhere``: the sender itself waits at another leader, at ``addresses``; may also follow later.
    """

    KIND, LIMIT = "group-receipt", 4 * KIB
    verdict: Literal["noted", "passed", "elsewhere", "busy", "refuse"]
    reason: Reason = ""
    round: Count
    leader: PeerId | None = None
    addresses: Annotated[tuple[Address, ...], Field(max_length=8)] = ()


class GroupAlive(Message):
    """Heartbeat of either side while it has nothing else to send, so that silence means a stopped process or a dead link."""

    KIND = "group-alive"


class GroupFormed(Message):
    """The leader's message to a member of its group: the signed ready messages of all, each after its length as two bytes.

    ``alone``: no other member was ready. A second such message calls the first attempt off and asks for another.
    """

    KIND, LIMIT = "group-formed", MAX_GROUP * (KIB + ENVELOPE + 2) + KIB
    nonce: Nonce
    reduction: Literal["gather", "allreduce"]
    alone: bool
    members: Annotated[bytes, Field(max_length=MAX_GROUP * (KIB + ENVELOPE + 2))]


class GroupLost(Message):
    """The leader's list of members that died since the group was formed, so that nobody waits for their data."""

    KIND = "group-lost"
    nonce: Nonce
    lost: Places


class GroupHello(Message):
    """Opening of the stream between two members over which they exchange payloads."""

    KIND = "group-hello"
    nonce: Nonce


class GroupReport(Message):
    """A member's report of the contributions that it holds whole; after an all-reduce: all or none."""

    KIND = "group-report"
    nonce: Nonce
    held: Places


class GroupDecision(Message):
    """Signed decision of the leader: the members whose contributions make the mean. None: the exchange is off."""

    KIND = "group-decision"
    swarm: SwarmId
    nonce: Nonce
    mean: Places


class GroupQuestion(Message):
    """Question to the leader or another member for the decision, after the channel to the leader broke."""

    KIND = "group-question"
    nonce: Nonce


class GroupReply(Message):
    """The sealed decision, from the leader or a member that received it; None if the replying side does not have it."""

    KIND, LIMIT = "group-reply", 2 * KIB
    decision: Annotated[bytes, Field(max_length=KIB + ENVELOPE)] | None
