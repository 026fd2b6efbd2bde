"""Asking members for a change of the swarm's settings, and showing them one."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterable, Mapping, Sequence
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
from shoal.swarm.p2p.addresses import known_first
from shoal.swarm.p2p.messages import ask
from shoal.swarm.wire.messages import Member

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host

MESSAGE_S = 5.0
"""For one small message."""
OPEN_S = 10.0
"""To open a stream."""
MAX_ASKED = 8
"""Members that a visitor asks for the newest change."""
ANSWER_S = 20.0
"""For the answer of each of several members that are asked at once."""
GRACE_S = 5.0
"""More for all of them together."""


def asking_order(members: Iterable[Member], met: Mapping[str, str]) -> list[Member]:
    """Return the members by whom to ask first: those that were ``met``, then the others, one of
    each address range in turn, and else as drawn.

    Their numbers do not count: a record that states one costs nothing.
    """
    drawn = list(members)
    random.shuffle(drawn)
    by_peer = {member.peer: member for member in drawn}
    said = ((member.peer, member.addresses) for member in drawn)
    return [by_peer[peer] for peer in known_first(said, met)]


async def swap_change(
    host: Host, peer: str, addresses: Sequence[str], swarm: str, sealed: bytes
) -> ChangeReply:
    """Show a peer the change ``sealed`` (empty: none) and return its reply, unverified.

    Raises NetworkError or MessageError.
    """
    stream = await host.open(peer, CHANGE_PROTOCOL, addresses=addresses, timeout=OPEN_S)
    with contextlib.closing(stream):
        return await ask(stream, ChangeRequest(swarm=swarm, change=sealed), ChangeReply, MESSAGE_S)


def swap_with(
    host: Host, swarm: str, members: Sequence[Member], sealed: bytes
) -> tuple[dict[str, ChangeReply], list[str]]:
    """Show all of some members the change ``sealed`` (empty: none) at once; return peer -> its
    reply, unverified, and what was wrong with the others.

    Raises NetworkError if the own daemon does not answer.
    """

    async def swapped() -> list[ChangeReply | BaseException]:
        calls = []
        for member in members:
            swapping = swap_change(host, member.peer, member.addresses, swarm, sealed)
            calls.append(asyncio.wait_for(swapping, ANSWER_S))
        return await asyncio.gather(*calls, return_exceptions=True)

    replies = {}
    problems = []
    for member, reply in zip(members, host.call(swapped(), ANSWER_S + GRACE_S), strict=True):
        if isinstance(reply, BaseException):
            problems.append(str(reply).rstrip(".") or "it did not answer in time")
        else:
            replies[member.peer] = reply
    return replies, problems


def newest_of(replies: Iterable[ChangeReply], swarm: str, manifest: Manifest) -> Change | None:
    """Return the newest change in ``replies`` that the creator signed; None: there is none."""
    newest: tuple[Change | None, bytes] = (None, b"")
    for reply in replies:
        if not reply.change:
            continue
        with contextlib.suppress(MessageError):
            found = open_change(reply.change, swarm, manifest.creator)
            newest = max(newest, (found, reply.change), key=lambda one: rank_of(*one))
    return newest[0]


def newest_change(
    host: Host, swarm: str, manifest: Manifest, members: Mapping[str, Member]
) -> Change | None:
    """Return the newest change that ``members`` hand out, for a visitor; None: they state none, or
    none of them answers.
    """
    ahead = [member for member in members.values() if member.change]
    if not ahead:
        return None
    replies, _ = swap_with(host, swarm, asking_order(ahead, host.met)[:MAX_ASKED], b"")
    return newest_of(replies.values(), swarm, manifest)
