"""The messages between members of a swarm and a bootstrap node (`shoal seed`). A public swarm is announced to it, and listed by it
(`shoal swarms`).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shoal.swarm.wire.envelope import ENVELOPE, KIB, Message
from shoal.swarm.wire.fields import Bytes, Count, Moment, PeerId, Reason, ShortLabel, SwarmId
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


SWARMS_PROTOCOL = "/shoal/swarms/1"
MAX_LISTED = 4  # swarms in one reply
MAX_CONTACTS = 2  # members of each that are named with it
MAX_MANIFEST = 12 * KIB  # bytes of a sealed manifest that is announced


class Announcement(Message):
    """What a member says of its public swarm, for people who look for one; ``issued`` in Unix seconds.

    ``manifest``: the swarm's sealed manifest, whose hash is ``swarm``. The rest is as the member ``peer`` says: ``params``, the
    number of parameters; ``round_bytes``, bytes that a node sends in a round; ``memory``, bytes of main memory that averaging takes
    beyond training alone, 0 where it was not measured; ``device``, on what it computes: cpu, cuda, xpu or mps.
    """

    KIND, LIMIT, AUTHOR = "announcement", 13 * KIB, "peer"
    swarm: SwarmId
    peer: PeerId
    manifest: Annotated[bytes, Field(max_length=MAX_MANIFEST)]
    params: Count
    round_bytes: Bytes
    memory: Bytes
    device: ShortLabel
    issued: Moment


Sealed = Annotated[bytes, Field(max_length=Announcement.LIMIT + ENVELOPE)]
Contact = Annotated[bytes, Field(max_length=Member.LIMIT + ENVELOPE)]


class SwarmsRequest(Message):
    """Request for public swarms whose ids come after ``after``, in the order of their ids.

    ``announcement``: the sender's own sealed `Announcement`, to be listed to others.
    """

    KIND, LIMIT = "swarms-request", 14 * KIB
    after: SwarmId | None = None
    announcement: Sealed | None = None


class ListedSwarm(Message):
    """A public swarm: its sealed `Announcement`, the number of members that the bootstrap node knows, and some of their records."""

    KIND, LIMIT = "listed-swarm", 24 * KIB
    announcement: Sealed
    peers: Count
    contacts: Annotated[tuple[Contact, ...], Field(max_length=MAX_CONTACTS)] = ()


class SwarmsReply(Message):
    """Public swarms, each a packed `ListedSwarm`; ``more``: others come after the last.

    ``reason``: why the announcement was refused, if it was.
    """

    KIND, LIMIT = "swarms-reply", 98 * KIB
    swarms: Annotated[tuple[Annotated[bytes, Field(max_length=ListedSwarm.LIMIT)], ...], Field(max_length=MAX_LISTED)] = ()
    more: bool = False
    reason: Reason = ""
