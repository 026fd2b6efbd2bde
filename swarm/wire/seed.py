"""What members of a swarm and a seed say to each other."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shoal.swarm.wire.envelope import ENVELOPE, KIB, Message
from shoal.swarm.wire.fields import Reason, SwarmId
from shoal.swarm.wire.member import Member

SEED_PROTOCOL = "/shoal/seed/1"
TOLD = 8  # members that a seed names at once

Record = Annotated[bytes, Field(max_length=Member.LIMIT + ENVELOPE)]


class SeedRequest(Message):
    """Asks a seed for members of a swarm; ``record``: the sender's own sealed `Member`, by which others may find it there."""

    KIND, LIMIT = "seed-request", 8 * KIB
    swarm: SwarmId
    record: Record | None = None


class SeedReply(Message):
    """Sealed `Member` records of others; ``reason`` says why the sender's own was not noted, if it was not."""

    KIND, LIMIT = "seed-reply", 48 * KIB
    members: Annotated[tuple[Record, ...], Field(max_length=TOLD)] = ()
    reason: Reason = ""
