"""The messages of peer exchange: two members give each other their own records, and those of some peers that they know."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shoal.swarm.wire.envelope import KIB, Message
from shoal.swarm.wire.fields import Reason, SwarmId
from shoal.swarm.wire.seed import Record

SHUFFLE_PROTOCOL = "/shoal/shuffle/1"
MAX_OFFERED = 7  # records of others in one message: three of an active view and four of a passive one, as in HyParView


class Shuffle(Message):
    """The sender's own sealed `Member`, some of peers that it knows, and how many it wants (0: it only stays in touch)."""

    KIND, LIMIT = "shuffle", 48 * KIB
    swarm: SwarmId
    record: Record
    offered: Annotated[tuple[Record, ...], Field(max_length=MAX_OFFERED)] = ()
    want: Annotated[int, Field(ge=0, le=MAX_OFFERED)] = 0


class ShuffleReply(Message):
    """The same of the answering member; ``record`` None: it does not take part, for ``reason``."""

    KIND, LIMIT = "shuffle-reply", 48 * KIB
    record: Record | None = None
    offered: Annotated[tuple[Record, ...], Field(max_length=MAX_OFFERED)] = ()
    reason: Reason = ""
