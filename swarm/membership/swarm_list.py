"""What a node tells bootstrap nodes of itself and of its public swarm, the swarms that they list,
and redialling of lost peers.

A node reports itself to the swarm's bootstrap nodes, and meets the peers that they name. So a swarm
can be joined though every other address in the link is dead, and two parts of a swarm that lost
each other, but not the bootstrap node, meet again.

Of a partitioned swarm without one each half keeps its own directory, and a node that has a
neighbour looks no further. So every `REDIAL_S` seconds a node dials some of the peers that it knows
but has not in view, each again after twice the time, up to `LONGEST`. (libp2p itself refuses to
dial an address again for up to five minutes after many failures.) Peers that left on purpose are
not dialled.

That a listed swarm (`shoal swarms`) has this name and these settings follows from the hash of its
manifest, which is its id. Sizes are what one member says, and the number of peers what the
bootstrap node says: they help to choose, and joining checks all again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import Manifest, Title, is_public, swarm_id, title_of
from shoal.swarm.p2p.addresses import by_peer
from shoal.swarm.p2p.daemon import DAEMON_GONE, Daemon
from shoal.swarm.p2p.reachability import ANSWER_S, addresses_of, ask_seed
from shoal.swarm.p2p.stream import Stream, short
from shoal.swarm.pacing.meter import TrafficMeter
from shoal.swarm.wire.envelope import MAX_BYTES, MAX_COUNT, pack, peek, seal, unpack, unseal
from shoal.swarm.wire.messages import (
    GONE,
    MAX_MANIFEST,
    MAX_TOPICS,
    SEED_PROTOCOL,
    SWARMS_PROTOCOL,
    Announcement,
    ListedSwarm,
    Member,
    SwarmsReply,
    SwarmsRequest,
)

if TYPE_CHECKING:
    from shoal.swarm.membership.directory import Directory
    from shoal.swarm.p2p.host import Host

log = logging.getLogger(__name__)

REDIAL_S = 10.0  # seconds between two attempts
TRIED = 4  # peers dialled in one attempt
# seconds until a peer is dialled again
FIRST = 10.0
LONGEST = 300.0


class Reconnector:
    """Schedule of the peers to dial again: those that the host knows and the directory has not in
    view.
    """

    def __init__(self, host: Host, directory: Directory) -> None:
        self._host = host
        self._directory = directory
        self._due: dict[
            str, tuple[float, float]
        ] = {}  # for each peer the time of its next dial, and the pause after that
        self._gone: set[str] = set()

    def due(self, now: float) -> list[str]:
        """Return the addresses to dial at ``now``, which count as dialled."""
        where = by_peer(self._host.known())
        here = self._directory.everyone().keys()
        self._gone = ((self._gone | self._directory.departed().keys()) - here) & where.keys()
        missing = where.keys() - here - self._gone
        # A peer that has just vanished may be restarting, so the first dial waits too.
        self._due = {peer: self._due.get(peer, (now + FIRST, FIRST)) for peer in missing}
        next_peers = sorted((when, peer) for peer, (when, _) in self._due.items() if when <= now)[
            :TRIED
        ]
        for _, peer in next_peers:
            pause = min(2 * self._due[peer][1], LONGEST)
            self._due[peer] = now + pause, pause
        return [address for _, peer in next_peers for address in where[peer]]

    async def run(self) -> None:
        """Dial from time to time until cancelled. On the host's loop."""
        while True:
            await asyncio.sleep(REDIAL_S)
            try:
                if addresses := self.due(asyncio.get_running_loop().time()):
                    await self._host.meet(addresses)
            except NetworkError as error:
                log.debug("no lost peer was dialled: %s", error)
            except Exception as error:  # a bug must not keep the swarm apart
                self._host.internal_errors.caught("directory", error)


PERIOD = 20.0  # seconds between two reports; a seed forgets a silent node after six times as long
LOOK = 1.0  # seconds between checks for changed addresses of this node
OPEN_S = 10.0


class SeedAnnouncer:
    """Reports of this node to the seeds, and redialling of lost peers, until `close`."""

    def __init__(self, host: Host, directory: Directory, identity: Identity, swarm: str) -> None:
        self._host = host
        self._directory = directory
        self._identity = identity
        self._swarm = swarm
        self._announced: Announcement | None = None
        self._running = host.submit(self._run())
        self._looking = host.submit(Reconnector(host, directory).run())

    def report(self, timeout: float) -> None:
        """Report to all seeds now, within ``timeout`` seconds; a missing answer is no error.

        For any thread but the host's.
        """
        if self._host.seeds():
            try:
                self._host.call(self._report(), timeout)
            except NetworkError as error:
                log.info("this node was not reported to the bootstrap nodes: %s", error)

    def announce(
        self, manifest: bytes, *, params: int, round_bytes: int, memory: int, device: str
    ) -> None:
        """From now on announce the public swarm of the sealed ``manifest`` to the seeds; see
        `Announcement`.
        """
        if len(manifest) > MAX_MANIFEST:
            why = (
                "this swarm is not announced to bootstrap nodes: its settings have %d bytes, "
                "more than %d."
            )
            log.warning(why, len(manifest), MAX_MANIFEST)
            return
        self._announced = Announcement(
            swarm=self._swarm,
            peer=self._identity.peer_id,
            manifest=manifest,
            params=min(params, MAX_COUNT),
            round_bytes=min(round_bytes, MAX_BYTES),
            memory=min(memory, MAX_BYTES),
            device=device,
            issued=0.0,
        )

    def close(self) -> None:
        """Stop reporting. The last report stays with the seeds until they forget it."""
        self._running.cancel()
        self._looking.cancel()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due = 0.0
        reported = None
        while True:
            await asyncio.sleep(LOOK)
            own = self._directory.own()
            if own is None or (loop.time() < due and own.addresses == reported):
                continue
            due = loop.time() + PERIOD
            reported = own.addresses
            try:
                await self._host.find_seeds()
                await self._report()
            except NetworkError as error:
                log.debug("this node was not reported to the bootstrap nodes: %s", error)
            except Exception as error:  # a bug must not make this node unfindable
                self._host.internal_errors.caught("directory", error)

    async def _report(self) -> None:
        own = self._directory.own()
        if own is None:
            return
        record = seal(own, self._identity)
        known = self._directory.members()
        prefix = f"shoal/{self._swarm}/"
        relayed = any(
            "/p2p-circuit" in address for address in own.addresses
        )  # gossip does not cross a relayed connection
        topics = sorted(
            topic.removeprefix(prefix)
            for topic in self._host.pubsub.topics
            if relayed and topic.startswith(prefix)
        )
        for seed, addresses in self._host.seeds().items():
            try:
                opening = self._host.open(seed, SEED_PROTOCOL, addresses=addresses, timeout=OPEN_S)
                with contextlib.closing(await opening) as stream:
                    members = await ask_seed(stream, self._swarm, record, topics[:MAX_TOPICS])
                if self._announced is not None and own.state not in GONE:
                    await self._announce(seed, addresses, self._announced)
                strangers = addresses_of(
                    [m for m in members if m.peer not in known and m.peer != own.peer]
                )
                if strangers:
                    self._host.remember(strangers)
                    await self._host.meet(strangers)
            except (NetworkError, MessageError) as error:
                log.debug("this node was not reported to bootstrap node %s: %s", short(seed), error)

    async def _announce(self, seed: str, addresses: Sequence[str], announced: Announcement) -> None:
        """Announce the swarm to a seed, after this node's record.

        Raises NetworkError or MessageError.
        """
        sealed = seal(announced.model_copy(update={"issued": time.time()}), self._identity)
        stream = await self._host.open(seed, SWARMS_PROTOCOL, addresses=addresses, timeout=OPEN_S)
        if reason := (await _asked(stream, SwarmsRequest(announcement=sealed))).reason:
            log.warning("bootstrap node %s does not list this swarm: %s", short(seed), reason)


async def _asked(stream: Stream, request: SwarmsRequest) -> SwarmsReply:
    with contextlib.closing(stream):
        await stream.send(pack(request), ANSWER_S)
        return unpack(await stream.receive(SwarmsReply.LIMIT, ANSWER_S), SwarmsReply)


SEED_S = 15.0  # seconds for one bootstrap node
MAX_MEMBERS = 32  # of a swarm that a bootstrap node keeps; one that says more is no better known
MAX_PAGES = 64  # of one bootstrap node: more than it lists
LISTEN = ("/ip4/127.0.0.1/tcp/0",)


@dataclass(frozen=True)
class PublicSwarm:
    """A swarm that is listed."""

    swarm: str
    title: Title
    peers: int  # members that the bootstrap node knows, which keeps a bounded number of each swarm
    params: int
    round_bytes: int
    memory: int  # bytes beyond training alone; 0: not measured
    device: str  # on what the member that announced it computes: cpu, cuda, xpu or mps
    addresses: tuple[str, ...]  # of the bootstrap node that listed it, and of members
    options: Mapping[str, Any] = field(
        default_factory=dict
    )  # the task's, as the manifest has them, unchecked


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
        reply = await _asked(stream, SwarmsRequest(after=after))
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
