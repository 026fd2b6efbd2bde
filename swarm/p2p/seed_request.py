"""Asking a bootstrap node for members."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from shoal.swarm.errors import MessageError
from shoal.swarm.p2p.messages import ask
from shoal.swarm.p2p.stream import Stream, short
from shoal.swarm.wire.envelope import unseal
from shoal.swarm.wire.messages import Member, SeedReply, SeedRequest

log = logging.getLogger(__name__)

ANSWER_S = 5.0  # for each message


async def ask_seed(stream: Stream, swarm: str, record: bytes | None = None) -> list[Member]:
    """Return members of ``swarm`` that the bootstrap node names, signatures checked; ``record``:
    this node's sealed `Member`.

    A member named may be gone. Raises NetworkError or MessageError.
    """
    request = SeedRequest(swarm=swarm, record=record)
    reply = await ask(stream, request, SeedReply, ANSWER_S)
    if reply.reason:
        log.warning(
            "bootstrap node %s does not note this node: %s", short(stream.peer_id), reply.reason
        )
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


def addresses_of(members: Sequence[Member]) -> list[str]:
    """Return the full multiaddrs in the records of ``members``, without those of other peers."""
    return [a for member in members for a in member.addresses if a.endswith(f"/p2p/{member.peer}")]
