"""A node's side of a seed: asking it who is in the swarm, and telling it that one is there oneself."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from shoal.swarm.errors import MessageError
from shoal.swarm.p2p.stream import Stream, short
from shoal.swarm.wire.member import Member, pack, unpack, unseal
from shoal.swarm.wire.seed import SeedReply, SeedRequest

log = logging.getLogger(__name__)

ANSWER_S = 5.0  # seconds for each message


async def ask(stream: Stream, swarm: str, record: bytes | None = None) -> list[Member]:
    """Members of ``swarm`` that the seed at the other end names, signatures checked; ``record``: the own sealed `Member`.

    Raises NetworkError or MessageError. That a member is still there, nobody vouches for.
    """
    await stream.send(pack(SeedRequest(swarm=swarm, record=record)), ANSWER_S)
    reply = unpack(await stream.receive(SeedReply.LIMIT, ANSWER_S), SeedReply)
    if reply.reason:
        log.warning("seed %s does not note this node: %s", short(stream.peer_id), reply.reason)
    found = []
    for sealed in reply.members:
        try:
            _, member = unseal(sealed, Member)
        except MessageError as error:
            log.debug("seed %s named somebody falsely: %s", short(stream.peer_id), error)
            continue
        if member.swarm == swarm:
            found.append(member)
    return found


def addresses_of(members: Sequence[Member]) -> list[str]:
    """Full multiaddrs of ``members``, each ending with the peer whose record it is in."""
    return [a for member in members for a in member.addresses if a.endswith(f"/p2p/{member.peer}")]
