"""Asking members for a change of the swarm's settings, and showing them one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from shoal.swarm.changes import (
    CHANGE_PROTOCOL,
    Change,
    ChangeReply,
    ChangeRequest,
    open_change,
    rank_of,
)
from shoal.swarm.errors import MessageError
from shoal.swarm.manifest import Manifest
from shoal.swarm.p2p.messages import ask
from shoal.swarm.wire.messages import Member

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host

MESSAGE_S = 5.0
"""For one small message."""
OPEN_S = 10.0
"""To open a stream."""
MAX_ASKED = 8
"""Members that a visitor asks, those with the highest numbers first."""
ANSWER_S = 20.0
"""For all of them together."""


async def swap_change(
    host: Host, peer: str, addresses: Sequence[str], swarm: str, sealed: bytes
) -> ChangeReply:
    """Show a peer the change ``sealed`` (empty: none) and return its reply, unverified.

    Raises NetworkError or MessageError.
    """
    stream = await host.open(peer, CHANGE_PROTOCOL, addresses=addresses, timeout=OPEN_S)
    with contextlib.closing(stream):
        return await ask(stream, ChangeRequest(swarm=swarm, change=sealed), ChangeReply, MESSAGE_S)


def newest_change(
    host: Host, swarm: str, manifest: Manifest, members: Mapping[str, Member]
) -> Change | None:
    """Return the newest change that ``members`` hand out, for a visitor; None: they state none, or
    none of them answers.
    """
    ahead = [member for member in members.values() if member.change]
    ahead.sort(key=lambda member: member.change, reverse=True)

    async def asked() -> list[ChangeReply | BaseException]:
        calls = []
        for member in ahead[:MAX_ASKED]:
            calls.append(swap_change(host, member.peer, member.addresses, swarm, b""))
        return await asyncio.gather(*calls, return_exceptions=True)

    if not ahead:
        return None
    newest: tuple[Change | None, bytes] = (None, b"")
    for reply in host.call(asked(), ANSWER_S):
        if isinstance(reply, BaseException) or not reply.change:
            continue
        with contextlib.suppress(MessageError):
            found = open_change(reply.change, swarm, manifest.creator)
            newest = max(newest, (found, reply.change), key=lambda one: rank_of(*one))
    return newest[0]
