"""Joining a swarm and staying in touch: bootstrap addresses, peers of earlier runs, and members
that bootstrap nodes name. Everything here runs on the host's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from shoal.swarm.errors import NetworkError, StartupError
from shoal.swarm.p2p import connections
from shoal.swarm.p2p.addresses import by_peer
from shoal.swarm.p2p.daemon import DAEMON_GONE, Daemon, DaemonError
from shoal.swarm.p2p.daemon_process import Relay
from shoal.swarm.p2p.peerstore import Peerstore
from shoal.swarm.p2p.resource_manager import ResourceManager
from shoal.swarm.p2p.seed_request import addresses_of, ask_seed
from shoal.swarm.p2p.stream import Stream
from shoal.swarm.pacing.meter import TrafficMeter
from shoal.swarm.wire.messages import SEED_PROTOCOL

if TYPE_CHECKING:
    from hivemind.dht.node import DHTNode

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_LOOKED_UP = 16
"""Connected peers whose addresses are looked up at each look around."""
CALL_S = 5.0
"""For one question to the daemon or a peer."""
CONNECT_S = 10.0
"""To connect to members whose addresses are known."""
ASK_SEEDS_S = 5.0
"""That asking the bootstrap nodes may take."""
LOOK_IN_S = 3.0
"""In which one who only looks connects to members that bootstrap nodes name."""
ASK_SEEDS_AGAIN_S = 2.0
"""Between two questions to a bootstrap node that named no peer this node can reach."""
MEET_AGAIN_S = 1.0
"""Before members are asked again that were reached but did not answer: they may be busy."""
SEARCH_AGAIN_S = 10.0
"""Between two searches for others while no member is connected."""
LOOK_AROUND_S = (0.5, 1.0, 2.0, 5.0)
"""Before each further look at who is connected; the last repeats."""


@dataclass(frozen=True)
class HostOptions:
    """The arguments of `Host.start` for the daemon and the DHT node on it."""

    listen: Sequence[str]
    announce: Sequence[str]
    bootstrap: Sequence[str]
    validator: Any
    light: bool
    relay: Relay
    swarm: str | None
    must_join: bool


class Supervisor(Protocol):
    """What keeps the daemon alive, as far as a bootstrapper needs it."""

    addresses: tuple[str, ...]

    def running(self) -> Daemon:
        """Return the daemon. Raises NetworkError during a restart."""
        ...

    def running_dht(self) -> DHTNode:
        """Return the DHT node. Raises NetworkError during a restart."""
        ...

    async def unless_down(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Await ``work``, but give it up the moment the daemon dies."""
        ...


class Bootstrapper:
    """Find the members of the swarm.

    ``known`` keeps their addresses; ``resource_manager`` judges calls to the DHT node.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        peer_id: str,
        options: HostOptions,
        known: Peerstore,
        resource_manager: ResourceManager,
    ) -> None:
        others = [each for each in options.bootstrap if peer_of(each) != peer_id]
        # A link to this node alone is kept: dialling it says what is wrong with it.
        self.bootstrap = tuple(others or options.bootstrap)
        self.seeds: dict[str, tuple[str, ...]] = {}
        """Peer id -> addresses of the bootstrap peers that turned out to be bootstrap nodes
        (`shoal seed`).
        """
        self.entry: tuple[str, ...] = ()  # ids of the members through which this node joined
        self.hivemind_loaded = asyncio.Event()
        """Set once `hivemind_adapter` is imported: by the thread that starts the host, while the
        daemon starts and dials.
        """
        self._supervisor = supervisor
        self._peer_id = peer_id
        self._options = options
        self._known = known
        self._resource_manager = resource_manager
        # Bootstrap peers of which it is known whether they are bootstrap nodes.
        self._classified: set[str] = set()
        # Connected peer -> the look at which its addresses were looked up last.
        self._looked_up: dict[str, int] = {}

    async def enter(self, daemon: Daemon, end: float) -> DHTNode:
        """Join for the first time, until the instant ``end`` of the loop. Raises StartupError."""
        left = max(0.1, end - asyncio.get_running_loop().time())
        known = [address for address in self._known.addresses() if address not in self.bootstrap]
        reached, failed = await connections.connect_any(daemon, [*self.bootstrap, *known], left)
        self._known.learn(reached)
        reasons = {}
        for address, reason in failed.items():
            if address in self.bootstrap:
                reasons[address] = reason
        must_join = bool(self.bootstrap) and self._options.must_join
        if must_join and not reached:
            raise StartupError(_nobody_reached(reasons, len(known)))
        # Some of a link's addresses are old, and one that answers is enough.
        level = logging.INFO if reached else logging.WARNING
        for address, reason in reasons.items():
            log.log(level, "bootstrap peer %s %s", address, reason)
        members, dht = await self._join(daemon, reached, end)
        from shoal.swarm.p2p.hivemind_adapter import count_peers

        if must_join:
            await self._meet_again(dht, members, end)
        if must_join and not count_peers(dht):
            raise StartupError(self._nobody_joined(members))
        return dht

    async def _meet_again(self, dht: DHTNode, members: Sequence[str], end: float) -> None:
        """Let the DHT node call the ``members`` again until one has answered, or until the instant
        ``end`` of the loop.
        """
        from shoal.swarm.p2p.hivemind_adapter import count_peers, ping

        loop = asyncio.get_running_loop()
        while members and not count_peers(dht) and loop.time() + MEET_AGAIN_S + CALL_S <= end:
            await asyncio.sleep(MEET_AGAIN_S)
            pings = [asyncio.wait_for(ping(dht, peer), CALL_S) for peer in members]
            await asyncio.gather(*pings, return_exceptions=True)

    def _nobody_joined(self, members: Sequence[str]) -> str:
        """Return why the DHT node knows nobody though somebody was reached."""
        if self.seeds and not members:
            return (
                f"the bootstrap node {', '.join(self.seeds)} knows no member of this swarm "
                "that can be reached: its last one may have left; start a node that was in it "
                "with --resume, or get a new link."
            )
        return (
            f"{', '.join(members)} answered but does not hold the swarm's records: it may be "
            "stopping, or of another version; get a new link."
        )

    async def enter_again(self, daemon: Daemon) -> DHTNode:
        """Join after a restart of the daemon, through the peers that can be reached now."""
        addresses = list(dict.fromkeys((*self.bootstrap, *self._known.addresses())))
        reached, _ = await connections.connect_any(daemon, addresses, CALL_S)
        self._known.learn(reached)
        if addresses and not reached:
            log.warning(
                "none of the %d known addresses answers after the restart; waiting to be found",
                len(addresses),
            )
        _, dht = await self._join(daemon, reached, 0.0)
        return dht

    async def _join(
        self, daemon: Daemon, reached: Sequence[str], end: float
    ) -> tuple[list[str], DHTNode]:
        """Return the members among ``reached`` and those that bootstrap nodes name, all connected;
        and a DHT node that met them.
        """
        found: list[str] = []
        while self._options.swarm is not None:
            named = await self._ask_seeds(daemon, self._options.swarm, reached)
            met = {*reached, self._peer_id}
            more = [address for address in named if peer_of(address) not in met]
            timeout = LOOK_IN_S if self._options.light else CONNECT_S
            found, _ = await connections.connect_any(daemon, more, timeout)
            only_seeds = bool(self.seeds) and not set(reached) - set(self.seeds)
            has_time = asyncio.get_running_loop().time() + ASK_SEEDS_S <= end
            if found or not only_seeds or not self._options.must_join or not has_time:
                break
            # A member that nobody can reach needs some 20 s until it has a relay.
            await asyncio.sleep(ASK_SEEDS_AGAIN_S)
        members = [peer for peer in (*reached, *found) if peer not in self.seeds]
        self.entry = tuple(members)
        await self.hivemind_loaded.wait()
        from shoal.swarm.p2p.hivemind_adapter import join_dht

        return members, await join_dht(
            daemon,
            members,
            self._options.validator,
            self._options.light,
            self._resource_manager,
        )

    async def _ask_seeds(self, daemon: Daemon, swarm: str, reached: Sequence[str]) -> list[str]:
        """Return addresses of members of the swarm, from the bootstrap nodes among ``reached``."""
        named = by_peer(self.bootstrap)

        async def ask(peer: str) -> list[str]:
            try:
                stream = Stream(peer, *await daemon.open(peer, SEED_PROTOCOL), TrafficMeter())
            except DaemonError as error:
                if "protocols not supported" in str(error):
                    self._classified.add(peer)
                raise
            self._classified.add(peer)
            self.seeds[peer] = tuple(named[peer])
            with contextlib.closing(stream):
                return addresses_of(await ask_seed(stream, swarm))

        asked = [asyncio.wait_for(ask(peer), ASK_SEEDS_S) for peer in reached if peer in named]
        found: list[str] = []
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(answer, BaseException):
                log.debug("not a bootstrap node, or it did not answer: %r", answer)
            else:
                found += answer
        return found

    async def find_seeds(self) -> None:
        """Try the bootstrap peers again that did not answer so far: a bootstrap node may have been
        down. Raises NetworkError.
        """
        missing = [each for each in self.bootstrap if peer_of(each) not in self._classified]
        if not missing or self._options.swarm is None:
            return
        daemon = self._supervisor.running()
        connecting = connections.connect_any(daemon, missing, CALL_S)
        reached, _ = await self._supervisor.unless_down(connecting)
        await self._supervisor.unless_down(self._ask_seeds(daemon, self._options.swarm, reached))

    async def meet(self, addresses: Sequence[str]) -> None:
        """Connect to peers by full multiaddrs, and let the DHT node meet those that it does not
        know. Raises NetworkError.
        """
        from shoal.swarm.p2p.hivemind_adapter import knows, ping

        daemon = self._supervisor.running()
        dht = self._supervisor.running_dht()
        connecting = connections.connect_any(daemon, addresses, CONNECT_S)
        reached, _ = await self._supervisor.unless_down(connecting)
        self._known.learn(reached)
        for peer in reached:
            if peer not in self.seeds and not knows(dht, peer):
                with contextlib.suppress(*DAEMON_GONE, asyncio.TimeoutError):
                    await self._supervisor.unless_down(ping(dht, peer), CALL_S)

    async def look_around(self) -> None:
        """Keep the addresses of this node and of its peers up to date, and search for others while
        there are none, for ever.
        """
        searched = 0.0
        pauses = itertools.chain(LOOK_AROUND_S, itertools.repeat(LOOK_AROUND_S[-1]))
        for look, pause in enumerate(pauses):
            await asyncio.sleep(pause)
            try:
                daemon = self._supervisor.running()
            except NetworkError:
                continue
            try:
                own = await self._supervisor.unless_down(daemon.addresses(), CALL_S)
                self._supervisor.addresses = own
                peers = await self._supervisor.unless_down(daemon.peers(), CALL_S)
                await self._look_up(daemon, peers, look)
                now = asyncio.get_running_loop().time()
                if not set(peers) - set(self.seeds) and now - searched >= SEARCH_AGAIN_S:
                    searched = now
                    await self.meet([*self.bootstrap, *self._known.addresses()])
            except (TimeoutError, NetworkError, *DAEMON_GONE, ValueError) as error:
                log.debug("the daemon was not asked for its peers: %r", error)
            await asyncio.to_thread(self._known.save)

    async def _look_up(self, daemon: Daemon, peers: Sequence[str], look: int) -> None:
        """Note the addresses that connected peers give, first of those not looked up for
        longest.
        """
        self._looked_up = {peer: self._looked_up.get(peer, -1) for peer in peers}
        for peer in sorted(peers, key=self._looked_up.__getitem__)[:MAX_LOOKED_UP]:
            with contextlib.suppress(DaemonError):  # it has just gone
                found = await self._supervisor.unless_down(daemon.where(peer), CALL_S)
                if found:
                    self._known.remember(found)
                    self._looked_up[peer] = look


def peer_of(address: str) -> str:
    """Return the peer id at the end of a full multiaddr."""
    return address.rpartition("/p2p/")[2]


def _nobody_reached(reasons: Mapping[str, str], known: int) -> str:
    """Return what is said where no bootstrap peer answers, nor any of the ``known`` ones: each
    reason once.
    """
    for_reason: dict[str, list[str]] = {}
    for address, reason in reasons.items():
        for_reason.setdefault(reason, []).append(address)
    each = "; ".join(f"{', '.join(those)} {reason}" for reason, those in for_reason.items())
    besides = ""
    if known:
        besides = f"; nor does any of {known} addresses known from an earlier run answer"
    return f"no bootstrap peer can be reached: {each}{besides}."
