"""The messages between members of a swarm and a bootstrap node (`shoal seed`)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shoal.swarm.wire.envelope import ENVELOPE, KIB, Message
from shoal.swarm.wire.fields import Reason, SwarmId
from shoal.swarm.wire.member import Member

SEED_PROTOCOL, SEEN_PROTOCOL = "/shoal/seed/1", "/shoal/seen/1"
MAX_NAMED = 8  # members that a bootstrap node names at once
MAX_TOPICS = 8  # of one swarm that a member names

Topic = Annotated[str, Field(pattern=r"^[a-z-]{1,32}/[0-9]{1,4}$")]
Record = Annotated[bytes, Field(max_length=Member.LIMIT + ENVELOPE)]


class SeedRequest(Message):
    """Request for members of a swarm; ``record``: the sender's own sealed `Member`, by which others may find it.

    ``topics``: of a sender that has a relay, kinds and versions of the swarm's topics that the bootstrap node shall forward.
    """

    KIND, LIMIT = "seed-request", 8 * KIB
    swarm: SwarmId
    record: Record | None = None
    topics: Annotated[tuple[Topic, ...], Field(max_length=MAX_TOPICS)] = ()


class SeedReply(Message):
    """Sealed `Member` records of others; ``reason``: why the sender's own was not noted, if it was not."""

    KIND, LIMIT = "seed-reply", 48 * KIB
    members: Annotated[tuple[Record, ...], Field(max_length=MAX_NAMED)] = ()
    reason: Reason = ""
