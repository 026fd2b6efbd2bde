"""The public swarms that bootstrap nodes list (`shoal swarms`).

That a listed swarm has this name and these settings follows from the hash of its manifest, which is
its id. Sizes are what one member says, and the number of peers what the bootstrap node says: they
help to choose, and joining checks all again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import Manifest, Title, is_public, swarm_id, title_of
from shoal.swarm.membership.seed_announcer import ask_swarms
from shoal.swarm.p2p.daemon import DAEMON_GONE, Daemon
from shoal.swarm.p2p.seed_request import addresses_of
from shoal.swarm.p2p.stream import Stream, short
from shoal.swarm.pacing.meter import TrafficMeter
from shoal.swarm.wire.envelope import peek, unpack, unseal
from shoal.swarm.wire.messages import (
    SWARMS_PROTOCOL,
    Announcement,
    ListedSwarm,
    Member,
    SwarmsRequest,
)

log = logging.getLogger(__name__)


SEED_S = 15.0  # for one bootstrap node
MAX_MEMBERS = 32  # of a swarm that a bootstrap node keeps; one that says more is no better known
MAX_PAGES = 64  # of one bootstrap node: more than it lists
LISTEN = ("/ip4/127.0.0.1/tcp/0",)


@dataclass(frozen=True)
class PublicSwarm:
    """A swarm that is listed."""

    swarm: str
    title: Title
    peers: int
    """Members that the bootstrap node knows, which keeps a bounded number of each swarm."""
    params: int
    round_bytes: int
    memory: int
    """Bytes beyond training alone; 0: not measured."""
    device: str
    """On what the member that announced it computes: cpu, cuda, xpu or mps."""
    addresses: tuple[str, ...]
    """Of the bootstrap node that listed it, and of members."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The task's, as the manifest has them, unchecked."""


def read_listed(packed: bytes, seed: str) -> PublicSwarm:
    """Open what the bootstrap node at the address ``seed`` lists.

    Raises MessageError and nothing else.
    """
    listed = unpack(packed, ListedSwarm)
    _, said = unseal(listed.announcement, Announcement)
    if swarm_id(said.manifest) != said.swarm:
        raise MessageError(
            "An announcement was refused as forged: its manifest is not that of its swarm.",
            "forged",
        )
    if not is_public(said.manifest):
        raise MessageError("An announcement was refused: its swarm is not public.", "private")
    members = [
        member
        for _, member in (unseal(record, Member) for record in listed.contacts)
        if member.swarm == said.swarm
    ]
    addresses = tuple(dict.fromkeys([seed, *addresses_of(members)]))
    sizes = said.params, said.round_bytes, said.memory, said.device
    options = peek(said.manifest, Manifest.LIMIT).get("task_options")
    known = options if isinstance(options, dict) else {}
    return PublicSwarm(
        said.swarm,
        title_of(said.manifest),
        min(listed.peers, MAX_MEMBERS),
        *sizes,
        addresses,
        known,
    )


def merged(found: Iterable[PublicSwarm]) -> list[PublicSwarm]:
    """Return each swarm once, those with the most peers first: what the seed said that knows most
    of it, with all addresses.
    """
    best = dict[str, PublicSwarm]()
    addresses = dict[str, dict[str, None]]()
    for one in found:
        addresses.setdefault(one.swarm, {}).update(dict.fromkeys(one.addresses))
        if one.swarm not in best or one.peers > best[one.swarm].peers:
            best[one.swarm] = one
    whole = (replace(one, addresses=tuple(addresses[one.swarm])) for one in best.values())
    return sorted(whole, key=lambda one: (-one.peers, one.title.name, one.swarm))


async def _listed_by(daemon: Daemon, seed: str) -> list[PublicSwarm]:
    peer = seed.rpartition("/p2p/")[2]
    await daemon.connect(peer, [seed])
    found = list[PublicSwarm]()
    after = None
    for _ in range(MAX_PAGES):
        stream = Stream(peer, *await daemon.open(peer, SWARMS_PROTOCOL), TrafficMeter())
        reply = await ask_swarms(stream, SwarmsRequest(after=after))
        last = after
        for packed in reply.swarms:
            try:
                last = unseal(unpack(packed, ListedSwarm).announcement, Announcement)[1].swarm
                found.append(read_listed(packed, seed))
            except MessageError as error:
                log.debug("bootstrap node %s listed something wrong: %s", short(peer), error)
        if not reply.more or last == after:
            break
        after = last
    return found


async def look(seeds: Sequence[str]) -> tuple[list[PublicSwarm], list[str]]:
    """Ask all ``seeds`` at once, by a daemon of this call; return the swarms, and a sentence for
    each seed that did not answer.

    Raises StartupError: the daemon does not start.
    """
    daemon = await Daemon.launch(Identity.ephemeral(), listen=LISTEN, relay="off", light=True)
    try:
        answers = await asyncio.gather(*(_within(daemon, seed) for seed in seeds))
    finally:
        await daemon.shutdown()
    return merged(one for found, _ in answers for one in found), [
        problem for _, problem in answers if problem
    ]


async def _within(daemon: Daemon, seed: str) -> tuple[list[PublicSwarm], str]:
    try:
        return await asyncio.wait_for(_listed_by(daemon, seed), SEED_S), ""
    except TimeoutError:
        return (
            [],
            f"the bootstrap node at {seed} did not answer within {SEED_S:g} s: check the address, "
            "or ask another one.",
        )
    except (*DAEMON_GONE, ValueError) as error:
        why = str(error).partition(":")[0]  # the daemon goes on about each address
        return (
            [],
            f"the bootstrap node at {seed} does not answer ({why}): check the address, or ask "
            "another one.",
        )
    except (NetworkError, MessageError) as error:
        return [], str(error)
