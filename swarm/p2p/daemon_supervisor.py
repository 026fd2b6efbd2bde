"""The daemon and the DHT node on it, kept alive: found dead, they are started again and the swarm is looked up again.

Everything here runs on the host's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from hivemind.dht.node import DHTNode
from hivemind.p2p import P2PDaemonError, PeerID

from shoal.swarm.errors import NetworkError, ShoalError, StartupError
from shoal.swarm.identity import Identity
from shoal.swarm.p2p import dial as boot
from shoal.swarm.p2p import seed_client
from shoal.swarm.p2p.daemon import Daemon, join_dht, met
from shoal.swarm.p2p.daemon_process import Relay
from shoal.swarm.p2p.dial import answering
from shoal.swarm.p2p.listen import as_before, check_free, fixed_ports
from shoal.swarm.p2p.multiaddr import is_loopback, origin
from shoal.swarm.p2p.peerstore import Peerstore
from shoal.swarm.p2p.stream import Stream, TrafficMeter
from shoal.swarm.wire.seed import SEED_PROTOCOL

log = logging.getLogger(__name__)

T = TypeVar("T")
# Who opened it, and from which IP address.
Incoming = Callable[[str, str, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

DAEMON_GONE = (P2PDaemonError, OSError, EOFError)  # what hivemind's calls raise when the daemon is dead, or refuses
ASKED = 16  # connected peers whose addresses are looked up at each look around
SEED_S = 5.0  # seconds that asking the seeds may take
SEED_AGAIN = 2.0  # seconds between two questions to a seed that named nobody we can reach
ALONE = 10.0  # seconds between two searches for others while nobody is connected
LOOK_AROUND = (0.5, 1.0, 2.0, 5.0)  # seconds before each further look at who is connected; the last repeats
BACKOFF = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)  # seconds before each further attempt to restart the daemon; the last repeats


class DaemonSupervisor:
    """Call `begin` once; then ``daemon`` and ``dht`` are there, but for the moments of a restart."""

    def __init__(
        self,
        identity: Identity,
        *,
        listen: Sequence[str],
        announce: Sequence[str],
        bootstrap: Sequence[str],
        validator: Any,
        light: bool,
        relay: Relay = "auto",
        known: Peerstore | None = None,
        swarm: str | None = None,
        must_join: bool = True,
        calls: Callable[[str, int], str] = lambda peer, nbytes: "",
    ) -> None:
        self.daemon: Daemon | None = None
        self.dht: DHTNode | None = None
        self.addresses: tuple[str, ...] = ()
        self.restarts = 0
        self.known = Peerstore(identity.peer_id) if known is None else known
        self.seeds: dict[str, tuple[str, ...]] = {}
        """Peer id -> addresses of the bootstrap peers that turned out to be seeds."""
        self._identity = identity
        self._listen = self._wanted = tuple(listen)
        self._announce = tuple(announce)
        self._bootstrap = tuple(bootstrap)
        self._validator = validator
        self._light = light
        self._relay = relay
        self._swarm = swarm
        self._must_join = must_join
        self._calls = calls  # says why a call of a peer to the DHT node is refused
        self._down: asyncio.Future[None] | None = None  # done as soon as the present daemon is gone
        self.entry: tuple[str, ...] = ()
        self._classed: set[str] = set()  # bootstrap peers of which we know whether they are seeds
        self._asked: dict[str, int] = {}  # connected peer -> the look at which its addresses were looked up last
        self._handlers: dict[str, Incoming] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def serve(self, protocol: str, incoming: Incoming) -> None:
        """Hand streams of ``protocol`` to ``incoming``, now if the daemon runs, and again after each restart."""
        self._handlers[protocol] = incoming
        if self.daemon is not None:
            await self._register(self.daemon, protocol)

    async def _register(self, daemon: Daemon, protocol: str) -> None:
        async def incoming(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._handlers[protocol](info.peer_id.to_base58(), origin(info.addr.to_bytes()), reader, writer)

        await daemon.add_binary_stream_handler(protocol, incoming)

    def running(self) -> Daemon:
        """The daemon. NetworkError during a restart."""
        if self.daemon is None:
            raise NetworkError("the network daemon is not running; it is being restarted.")
        return self.daemon

    def running_dht(self) -> DHTNode:
        """The DHT node. NetworkError during a restart."""
        self.running()
        if self.dht is None:
            raise NetworkError("the DHT is not ready; it is being restarted.")
        return self.dht

    async def unless_down(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        """Await ``work``, but give it up the moment the daemon dies. NetworkError, asyncio.TimeoutError."""
        assert self._down is not None
        task = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {task, self._down}
        try:
            await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if self._down.done():
                raise NetworkError("the network daemon stopped in the middle of a call; it is being restarted.")
            raise asyncio.TimeoutError
        finally:
            task.cancel()

    async def begin(self, timeout: float) -> None:
        """Get on the network within ``timeout`` seconds. Raises StartupError."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        if self._bootstrap and not self._light and all(is_loopback(a) for a in self._listen):
            far = [a for a in self._bootstrap if not is_loopback(a)]
            if far:
                log.warning("this node listens on loopback only, so peers elsewhere cannot reach it: use --listen")
        self._listen = as_before(self._wanted, self.known.listened)
        daemon = await self._launch(timeout)
        try:
            dht = await self._enter(daemon, end)
            await self._settle(daemon, dht)
        except BaseException as error:
            self.daemon = None
            await daemon.shutdown()
            if isinstance(error, DAEMON_GONE):
                raise StartupError(f"the network daemon stopped while the node was joining ({error}): try again.") from error
            raise
        self._tasks = [loop.create_task(self._keep_up()), loop.create_task(self._look_around())]

    async def _enter(self, daemon: Daemon, end: float) -> DHTNode:
        """Meet the swarm by the bootstrap addresses, by those of peers met in an earlier run, and by whom seeds name."""
        left = max(0.1, end - asyncio.get_running_loop().time())
        known = [address for address in self.known.addresses() if address not in self._bootstrap]
        reached, failed = await boot.connect_any(daemon, [*self._bootstrap, *known], left)
        told = {address: why for address, why in failed.items() if address in self._bootstrap}
        if self._bootstrap and self._must_join and not reached:
            raise boot.unreachable(told, tried_besides=len(known))
        for address, reason in told.items():
            log.warning("bootstrap peer %s %s", address, reason)
        members, dht = await self._join(daemon, reached, end)
        if self._bootstrap and self._must_join and not met(dht):
            if self.seeds and not members:
                raise StartupError(
                    f"the seed {', '.join(self.seeds)} knows no member of this swarm that can be reached: its last one may have "
                    "left; start a node that was in it with --resume, or get a new link."
                )
            raise StartupError(
                f"{', '.join(members)} answered but does not hold the swarm's records: it may be stopping, or of another "
                "version; get a new link."
            )
        return dht

    async def _join(self, daemon: Daemon, reached: Sequence[str], end: float) -> tuple[list[str], DHTNode]:
        """The members among ``reached`` and whom the seeds among them name, all connected to; and a DHT node met with them."""
        found: list[str] = []
        while self._swarm is not None:
            named = await self._ask_seeds(daemon, reached)
            more = [a for a in named if a.rpartition("/p2p/")[2] not in (*reached, self._identity.peer_id)]
            found, _ = await boot.connect_any(daemon, more, 10.0)
            only_seeds = bool(self.seeds) and not set(reached) - set(self.seeds)
            if found or not only_seeds or not self._must_join or asyncio.get_running_loop().time() + SEED_S > end:
                break
            await asyncio.sleep(SEED_AGAIN)  # a member that nobody can reach needs some 20 s until it has a relay
        members = [peer for peer in (*reached, *found) if peer not in self.seeds]
        self.entry = tuple(members)
        return members, await join_dht(daemon, members, self._validator, self._light)

    async def _ask_seeds(self, daemon: Daemon, reached: Sequence[str]) -> list[str]:
        """Addresses of members of our swarm, from the seeds among ``reached``."""
        assert self._swarm is not None
        swarm = self._swarm

        async def one(peer: str) -> list[str]:
            try:
                stream = Stream(peer, *await daemon.open(peer, SEED_PROTOCOL), TrafficMeter())
            except P2PDaemonError as error:
                if "protocols not supported" in str(error):
                    self._classed.add(peer)
                raise
            try:
                self._classed.add(peer)
                self.seeds[peer] = tuple(a for a in self._bootstrap if a.endswith(f"/p2p/{peer}"))
                return seed_client.addresses_of(await seed_client.ask(stream, swarm))
            finally:
                stream.close()

        asked = [asyncio.wait_for(one(peer), SEED_S) for peer in reached if peer in self._first_peers()]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                log.debug("no seed, or it did not answer: %r", answer)
        return [address for answer in answers if isinstance(answer, list) for address in answer]

    def _first_peers(self) -> set[str]:
        return {address.rpartition("/p2p/")[2] for address in self._bootstrap}

    async def find_seeds(self) -> None:
        """Try those bootstrap peers again that did not answer so far: a seed may have been down. NetworkError."""
        missing = [address for address in self._bootstrap if address.rpartition("/p2p/")[2] not in self._classed]
        if missing and self._swarm is not None:
            daemon = self.running()
            reached, _ = await self.unless_down(boot.connect_any(daemon, missing, 5.0), 6.0)
            await self.unless_down(self._ask_seeds(daemon, reached), SEED_S + 1.0)

    async def meet(self, addresses: Sequence[str]) -> None:
        """Connect to peers by full multiaddrs, and make those the DHT node does not know yet known to it. NetworkError."""
        daemon, dht = self.running(), self.running_dht()
        reached, _ = await self.unless_down(boot.connect_any(daemon, addresses, 10.0), 11.0)
        for peer in reached:
            if peer not in self.seeds and PeerID.from_base58(peer) not in dht.protocol.routing_table.peer_id_to_uid:
                with contextlib.suppress(*DAEMON_GONE, asyncio.TimeoutError):
                    await self.unless_down(dht.protocol.call_ping(PeerID.from_base58(peer)), 5.0)

    async def _launch(self, timeout: float) -> Daemon:
        beyond = not all(map(is_loopback, self._listen))
        relays = await answering(self._bootstrap) if beyond and self._relay != "off" else []
        if self._relay == "only" and not relays:
            log.warning("no seed or bootstrap peer can forward to this node now, so nobody behind a NAT reaches it")
        daemon = await Daemon.launch(
            self._identity,
            listen=self._listen,
            announce=self._announce,
            relays=relays,
            relay=self._relay,
            public=bool(self._announce) and self._relay == "auto",  # who says where it is reached is reached there
            light=self._light,
            timeout=timeout,
        )
        daemon.refuses = self._calls
        return daemon

    async def _settle(self, daemon: Daemon, dht: DHTNode) -> None:
        self.addresses = await daemon.addresses()
        self._listen = self.known.listened = fixed_ports(self._listen, self.addresses)
        self._down = asyncio.get_running_loop().create_future()
        self.dht, self.daemon = dht, daemon
        for protocol in list(self._handlers):
            await self._register(daemon, protocol)

    async def _keep_up(self) -> None:
        """Restart the daemon whenever it ends."""
        while True:
            daemon = self.running()
            status = await daemon.ended()
            log.warning("the network daemon stopped (status %s); restarting it", status)
            self.daemon = None
            dht, self.dht = self.dht, None
            if dht is not None:
                dht.is_alive = False
            if self._down is not None and not self._down.done():
                self._down.set_result(None)
            await daemon.shutdown()
            attempt = 0
            while self.daemon is None:
                await asyncio.sleep(BACKOFF[min(attempt, len(BACKOFF) - 1)])
                attempt += 1
                try:
                    await asyncio.wait_for(self._again(), 60.0)
                except Exception as error:  # whatever it was, the node needs its network back
                    expected = isinstance(error, (ShoalError, *DAEMON_GONE, asyncio.TimeoutError))
                    why = str(error) or type(error).__name__
                    log.warning("the network daemon is not back yet, trying again: %s", why, exc_info=not expected)

    async def _again(self) -> None:
        try:
            check_free(self._listen)
        except StartupError:
            if self._listen == self._wanted:
                raise
            check_free(self._wanted)  # any port was wanted, so the lost one is no loss
            self._listen = self._wanted
        daemon = await self._launch(20.0)
        try:
            find = list(dict.fromkeys((*self._bootstrap, *self.known.addresses())))
            reached, _ = await boot.connect_any(daemon, find, 5.0)
            if find and not reached:
                log.warning("none of the %d known addresses answers after the restart; waiting to be found", len(find))
            _, dht = await self._join(daemon, reached, 0.0)
            await self._settle(daemon, dht)
        except BaseException:
            self.daemon = None
            await daemon.shutdown()
            raise
        self.restarts += 1
        log.warning("the network daemon runs again (restart %d)", self.restarts)

    async def _look_around(self) -> None:
        """Keep the own addresses and those of the peers up to date; alone, look for the others."""
        searched = 0.0
        for look in itertools.count():
            await asyncio.sleep(LOOK_AROUND[min(look, len(LOOK_AROUND) - 1)])
            daemon = self.daemon
            if daemon is None:
                continue
            try:
                self.addresses = await self.unless_down(daemon.addresses(), 5.0)
                peers = await self.unless_down(daemon.peers(), 5.0)
                await self._look_up(daemon, peers, look)
                now = asyncio.get_running_loop().time()
                if not set(peers) - set(self.seeds) and now - searched >= ALONE:
                    searched = now
                    await self.meet([*self._bootstrap, *self.known.addresses()])
            except (NetworkError, *DAEMON_GONE, ValueError, asyncio.TimeoutError) as error:
                log.debug("the daemon was not asked for its peers: %r", error)
            await asyncio.to_thread(self.known.save)

    async def _look_up(self, daemon: Daemon, peers: Sequence[str], look: int) -> None:
        """Note where connected peers say they are, those first who were asked longest ago."""
        self._asked = {peer: self._asked.get(peer, -1) for peer in peers}
        for peer in sorted(peers, key=lambda peer: self._asked[peer])[:ASKED]:
            with contextlib.suppress(P2PDaemonError):  # it has just gone
                if found := await self.unless_down(daemon.where(peer), 5.0):
                    self.known.remember(found)
                    self._asked[peer] = look

    async def end(self, timeout: float) -> None:
        """Leave the network and end the daemon, in about ``timeout`` seconds at most."""
        for task in self._tasks:
            task.cancel()
        self.known.save()
        dht, self.dht = self.dht, None
        if dht is not None:
            with contextlib.suppress(*DAEMON_GONE, asyncio.TimeoutError):
                await asyncio.wait_for(dht.shutdown(), timeout / 2)
        if self.daemon is not None:
            await self.daemon.shutdown()
            self.daemon = None
