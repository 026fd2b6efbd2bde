"""Joining a swarm and staying in touch: bootstrap addresses, peers of earlier runs, members that bootstrap nodes name.

Everything here runs on the host's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from shoal.swarm.errors import NetworkError, StartupError
from shoal.swarm.p2p import dial, seed_client
from shoal.swarm.p2p.daemon import DAEMON_GONE, Daemon, DaemonError
from shoal.swarm.p2p.peerstore import Peerstore
from shoal.swarm.p2p.stream import Stream
from shoal.swarm.pacing.meter import TrafficMeter
from shoal.swarm.wire.seed import SEED_PROTOCOL

if TYPE_CHECKING:
    from hivemind.dht.node import DHTNode

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOKED_UP = 16  # connected peers whose addresses are looked up at each look around
SEED_S = 5.0  # seconds that asking the bootstrap nodes may take
LOOK_IN_S = 3.0  # seconds in which one who only looks connects to members that bootstrap nodes name
SEED_AGAIN = 2.0  # seconds between two questions to a bootstrap node that named no peer this node can reach
ALONE = 10.0  # seconds between two searches for others while no member is connected
LOOK_AROUND = (0.5, 1.0, 2.0, 5.0)  # seconds before each further look at who is connected; the last repeats


class Supervisor(Protocol):
    """The part of a `DaemonSupervisor` that knows what runs now. Its methods raise NetworkError during a restart."""

    addresses: tuple[str, ...]

    def running(self) -> Daemon:
        """Return the daemon."""

    def running_dht(self) -> DHTNode:
        """Return the DHT node."""

    async def unless_down(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        """Await ``work``, but give it up the moment the daemon dies."""


class Bootstrapper:
    """Find the members of ``swarm``. ``known`` keeps their addresses; ``must_join``: it is an error if none can be reached."""

    def __init__(
        self,
        supervisor: Supervisor,
        peer_id: str,
        *,
        bootstrap: Sequence[str],
        known: Peerstore,
        swarm: str | None,
        must_join: bool,
        validator: Any,
        light: bool,
        calls: Callable[[str, int], str],
    ) -> None:
        self.bootstrap = tuple(bootstrap)
        self.seeds: dict[str, tuple[str, ...]] = {}
        """Peer id -> addresses of the bootstrap peers that turned out to be bootstrap nodes (`shoal seed`)."""
        self.entry: tuple[str, ...] = ()
        """Ids of the members through which this node joined."""
        self.hivemind_loaded = asyncio.Event()
        """Set once `hivemind_adapter` is imported: by the thread that starts the host, while the daemon starts and dials."""
        self._supervisor, self._peer_id, self._known = supervisor, peer_id, known
        self._swarm, self._must_join, self._validator, self._light, self._calls = swarm, must_join, validator, light, calls
        self._classified: set[str] = set()  # bootstrap peers of which it is known whether they are bootstrap nodes
        self._looked_up: dict[str, int] = {}  # connected peer -> the look at which its addresses were looked up last

    async def enter(self, daemon: Daemon, end: float) -> DHTNode:
        """Join for the first time, until the instant ``end`` of the loop. Raises StartupError."""
        left = max(0.1, end - asyncio.get_running_loop().time())
        known = [address for address in self._known.addresses() if address not in self.bootstrap]
        reached, failed = await dial.connect_any(daemon, [*self.bootstrap, *known], left)
        self._known.learn(reached)
        reasons = {address: reason for address, reason in failed.items() if address in self.bootstrap}
        if self.bootstrap and self._must_join and not reached:
            raise dial.unreachable(reasons, tried_besides=len(known))
        for address, reason in reasons.items():  # some of a link's addresses are old, and one that answers is enough
            log.log(logging.INFO if reached else logging.WARNING, "bootstrap peer %s %s", address, reason)
        members, dht = await self._join(daemon, reached, end)
        from shoal.swarm.p2p.hivemind_adapter import count_peers

        if self.bootstrap and self._must_join and not count_peers(dht):
            if self.seeds and not members:
                raise StartupError(
                    f"the bootstrap node {', '.join(self.seeds)} knows no member of this swarm that can be reached: its last one "
                    "may have left; start a node that was in it with --resume, or get a new link."
                )
            raise StartupError(
                f"{', '.join(members)} answered but does not hold the swarm's records: it may be stopping, or of another "
                "version; get a new link."
            )
        return dht

    async def enter_again(self, daemon: Daemon) -> DHTNode:
        """Join after a restart of the daemon, through the peers that can be reached now."""
        addresses = list(dict.fromkeys((*self.bootstrap, *self._known.addresses())))
        reached, _ = await dial.connect_any(daemon, addresses, 5.0)
        self._known.learn(reached)
        if addresses and not reached:
            log.warning("none of the %d known addresses answers after the restart; waiting to be found", len(addresses))
        _, dht = await self._join(daemon, reached, 0.0)
        return dht

    async def _join(self, daemon: Daemon, reached: Sequence[str], end: float) -> tuple[list[str], DHTNode]:
        """Return the members among ``reached`` and those that bootstrap nodes name, all connected; and a DHT node that met them."""
        found: list[str] = []
        while self._swarm is not None:
            named = await self._ask_seeds(daemon, reached)
            more = [address for address in named if address.rpartition("/p2p/")[2] not in (*reached, self._peer_id)]
            found, _ = await dial.connect_any(daemon, more, LOOK_IN_S if self._light else 10.0)
            only_seeds = bool(self.seeds) and not set(reached) - set(self.seeds)
            if found or not only_seeds or not self._must_join or asyncio.get_running_loop().time() + SEED_S > end:
                break
            await asyncio.sleep(SEED_AGAIN)  # a member that nobody can reach needs some 20 s until it has a relay
        members = [peer for peer in (*reached, *found) if peer not in self.seeds]
        self.entry = tuple(members)
        await self.hivemind_loaded.wait()
        from shoal.swarm.p2p.hivemind_adapter import join_dht

        return members, await join_dht(daemon, members, self._validator, self._light, self._calls)

    async def _ask_seeds(self, daemon: Daemon, reached: Sequence[str]) -> list[str]:
        """Return addresses of members of the swarm, from the bootstrap nodes among ``reached``."""
        assert self._swarm is not None
        swarm = self._swarm

        async def ask(peer: str) -> list[str]:
            try:
                stream = Stream(peer, *await daemon.open(peer, SEED_PROTOCOL), TrafficMeter())
            except DaemonError as error:
                if "protocols not supported" in str(error):
                    self._classified.add(peer)
                raise
            try:
                self._classified.add(peer)
                self.seeds[peer] = tuple(address for address in self.bootstrap if address.endswith(f"/p2p/{peer}"))
                return seed_client.addresses_of(await seed_client.ask(stream, swarm))
            finally:
                stream.close()

        bootstrap = {address.rpartition("/p2p/")[2] for address in self.bootstrap}
        asked = [asyncio.wait_for(ask(peer), SEED_S) for peer in reached if peer in bootstrap]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                log.debug("not a bootstrap node, or it did not answer: %r", answer)
        return [address for answer in answers if isinstance(answer, list) for address in answer]

    async def find_seeds(self) -> None:
        """Try the bootstrap peers again that did not answer so far: a bootstrap node may have been down. Raises NetworkError."""
        missing = [address for address in self.bootstrap if address.rpartition("/p2p/")[2] not in self._classified]
        if missing and self._swarm is not None:
            daemon = self._supervisor.running()
            reached, _ = await self._supervisor.unless_down(dial.connect_any(daemon, missing, 5.0), 6.0)
            await self._supervisor.unless_down(self._ask_seeds(daemon, reached), SEED_S + 1.0)

    async def meet(self, addresses: Sequence[str]) -> None:
        """Connect to peers by full multiaddrs, and let the DHT node meet those that it does not know. Raises NetworkError."""
        from shoal.swarm.p2p.hivemind_adapter import knows, ping

        daemon, dht = self._supervisor.running(), self._supervisor.running_dht()
        reached, _ = await self._supervisor.unless_down(dial.connect_any(daemon, addresses, 10.0), 11.0)
        self._known.learn(reached)
        for peer in reached:
            if peer not in self.seeds and not knows(dht, peer):
                with contextlib.suppress(*DAEMON_GONE, asyncio.TimeoutError):
                    await self._supervisor.unless_down(ping(dht, peer), 5.0)

    async def look_around(self) -> None:
        """Keep the addresses of this node and of its peers up to date, and search for others while there are none, for ever."""
        searched = 0.0
        for look in itertools.count():
            await asyncio.sleep(LOOK_AROUND[min(look, len(LOOK_AROUND) - 1)])
            try:
                daemon = self._supervisor.running()
            except NetworkError:
                continue
            try:
                self._supervisor.addresses = await self._supervisor.unless_down(daemon.addresses(), 5.0)
                peers = await self._supervisor.unless_down(daemon.peers(), 5.0)
                await self._look_up(daemon, peers, look)
                now = asyncio.get_running_loop().time()
                if not set(peers) - set(self.seeds) and now - searched >= ALONE:
                    searched = now
                    await self.meet([*self.bootstrap, *self._known.addresses()])
            except (NetworkError, *DAEMON_GONE, ValueError, asyncio.TimeoutError) as error:
                log.debug("the daemon was not asked for its peers: %r", error)
            await asyncio.to_thread(self._known.save)

    async def _look_up(self, daemon: Daemon, peers: Sequence[str], look: int) -> None:
        """Note the addresses that connected peers give, first of those not looked up for longest."""
        self._looked_up = {peer: self._looked_up.get(peer, -1) for peer in peers}
        for peer in sorted(peers, key=lambda peer: self._looked_up[peer])[:LOOKED_UP]:
            with contextlib.suppress(DaemonError):  # it has just gone
                if found := await self._supervisor.unless_down(daemon.where(peer), 5.0):
                    self._known.remember(found)
                    self._looked_up[peer] = look
