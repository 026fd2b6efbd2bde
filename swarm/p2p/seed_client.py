"""The client of bootstrap nodes (`shoal seed`): ask one for members of the swarm, and report this node to it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from shoal.swarm.errors import MessageError
from shoal.swarm.p2p.stream import Stream, short
from shoal.swarm.wire.envelope import pack, unpack, unseal
from shoal.swarm.wire.member import Member
from shoal.swarm.wire.seed import SeedReply, SeedRequest, SwarmsReply, SwarmsRequest

log = logging.getLogger(__name__)

ANSWER_S = 5.0  # seconds for each message


async def ask(stream: Stream, swarm: str, record: bytes | None = None, topics: Sequence[str] = ()) -> list[Member]:
    """Return members of ``swarm`` that the bootstrap node names, signatures checked; ``record``: this node's sealed `Member`.
    ``topics``: of the swarm, to forward.

    A member named may be gone. Raises NetworkError or MessageError.
    """
    await stream.send(pack(SeedRequest(swarm=swarm, record=record, topics=tuple(topics))), ANSWER_S)
    reply = unpack(await stream.receive(SeedReply.LIMIT, ANSWER_S), SeedReply)
    if reply.reason:
        log.warning("bootstrap node %s does not note this node: %s", short(stream.peer_id), reply.reason)
    found = []
    for sealed in reply.members:
        try:
            _, member = unseal(sealed, Member)
        except MessageError as error:
            log.debug("bootstrap node %s sent a wrong record: %s", short(stream.peer_id), error)
            continue
        if member.swarm == swarm:
            found.append(member)
    return found


async def announce(stream: Stream, announcement: bytes) -> str:
    """Hand a sealed `Announcement` to a bootstrap node; return why it was refused, or "". Raises NetworkError or MessageError."""
    await stream.send(pack(SwarmsRequest(announcement=announcement)), ANSWER_S)
    return unpack(await stream.receive(SwarmsReply.LIMIT, ANSWER_S), SwarmsReply).reason


def addresses_of(members: Sequence[Member]) -> list[str]:
    """Return the full multiaddrs in the records of ``members``, without those of other peers."""
    return [a for member in members for a in member.addresses if a.endswith(f"/p2p/{member.peer}")]
