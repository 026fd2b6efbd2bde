"""The daemon and the DHT node on it, kept alive: when the daemon dies it is started again and joins
the swarm again.

Joining a swarm and staying in touch: bootstrap addresses, peers of earlier runs, members that
bootstrap nodes name. Everything here runs on the host's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from shoal.swarm.errors import ListenError, NetworkError, ShoalError, StartupError
from shoal.swarm.identity import Identity
from shoal.swarm.internal_errors import InternalErrors
from shoal.swarm.p2p import connections
from shoal.swarm.p2p.addresses import by_peer, is_loopback
from shoal.swarm.p2p.connections import answering
from shoal.swarm.p2p.daemon import DAEMON_GONE, Daemon, DaemonError, Incoming
from shoal.swarm.p2p.daemon_process import Relay
from shoal.swarm.p2p.dial_backoff import DialBackoff
from shoal.swarm.p2p.listening import as_before, check_free, fixed_ports
from shoal.swarm.p2p.peerstore import Peerstore
from shoal.swarm.p2p.relay_slots import RelaySlots, launch_relay
from shoal.swarm.p2p.seed_request import addresses_of, ask_seed
from shoal.swarm.p2p.stream import Stream
from shoal.swarm.pacing.meter import TrafficMeter
from shoal.swarm.wire.messages import SEED_PROTOCOL

if TYPE_CHECKING:
    from hivemind.dht.node import DHTNode

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOKED_UP = 16  # connected peers whose addresses are looked up at each look around
SEED_S = 5.0  # seconds that asking the bootstrap nodes may take
LOOK_IN_S = 3.0  # seconds in which one who only looks connects to members that bootstrap nodes name
SEED_AGAIN = (
    2.0  # seconds between two questions to a bootstrap node that named no peer this node can reach
)
ALONE = 10.0  # seconds between two searches for others while no member is connected
LOOK_AROUND = (
    0.5,
    1.0,
    2.0,
    5.0,
)  # seconds before each further look at who is connected; the last repeats


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


class Bootstrapper:
    """Find the members of the swarm.

    ``known`` keeps their addresses; ``calls``: why a peer's call to the DHT node is refused.
    """

    def __init__(
        self,
        supervisor: DaemonSupervisor,
        peer_id: str,
        options: HostOptions,
        known: Peerstore,
        calls: Callable[[str, int], str],
    ) -> None:
        self.bootstrap = tuple(options.bootstrap)
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
        self._calls = calls
        # Bootstrap peers of which it is known whether they are bootstrap nodes.
        self._classified: set[str] = set()
        self._looked_up: dict[
            str, int
        ] = {}  # connected peer -> the look at which its addresses were looked up last

    async def enter(self, daemon: Daemon, end: float) -> DHTNode:
        """Join for the first time, until the instant ``end`` of the loop. Raises StartupError."""
        left = max(0.1, end - asyncio.get_running_loop().time())
        known = [address for address in self._known.addresses() if address not in self.bootstrap]
        reached, failed = await connections.connect_any(daemon, [*self.bootstrap, *known], left)
        self._known.learn(reached)
        reasons = {
            address: reason for address, reason in failed.items() if address in self.bootstrap
        }
        if self.bootstrap and self._options.must_join and not reached:
            each = "; ".join(f"{address} {reason}" for address, reason in reasons.items())
            besides = (
                f"; nor does any of {len(known)} addresses known from an earlier run answer"
                if known
                else ""
            )
            raise StartupError(f"no bootstrap peer can be reached: {each}{besides}.")
        for (
            address,
            reason,
        ) in reasons.items():  # some of a link's addresses are old, and one that answers is enough
            log.log(
                logging.INFO if reached else logging.WARNING,
                "bootstrap peer %s %s",
                address,
                reason,
            )
        members, dht = await self._join(daemon, reached, end)
        from shoal.swarm.p2p.hivemind_adapter import count_peers

        if self.bootstrap and self._options.must_join and not count_peers(dht):
            if self.seeds and not members:
                raise StartupError(
                    f"the bootstrap node {', '.join(self.seeds)} knows no member of this swarm "
                    "that can be reached: its last one may have left; start a node that was in it "
                    "with --resume, or get a new link."
                )
            raise StartupError(
                f"{', '.join(members)} answered but does not hold the swarm's records: it may be "
                "stopping, or of another version; get a new link."
            )
        return dht

    async def enter_again(self, daemon: Daemon) -> DHTNode:
        """Join after a restart of the daemon, through the peers that can be reached now."""
        addresses = list(dict.fromkeys((*self.bootstrap, *self._known.addresses())))
        reached, _ = await connections.connect_any(daemon, addresses, 5.0)
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
            more = [
                address
                for address in named
                if address.rpartition("/p2p/")[2] not in (*reached, self._peer_id)
            ]
            found, _ = await connections.connect_any(
                daemon, more, LOOK_IN_S if self._options.light else 10.0
            )
            only_seeds = bool(self.seeds) and not set(reached) - set(self.seeds)
            if (
                found
                or not only_seeds
                or not self._options.must_join
                or asyncio.get_running_loop().time() + SEED_S > end
            ):
                break
            await asyncio.sleep(
                SEED_AGAIN
            )  # a member that nobody can reach needs some 20 s until it has a relay
        members = [peer for peer in (*reached, *found) if peer not in self.seeds]
        self.entry = tuple(members)
        await self.hivemind_loaded.wait()
        from shoal.swarm.p2p.hivemind_adapter import join_dht

        return members, await join_dht(
            daemon, members, self._options.validator, self._options.light, self._calls
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

        asked = [asyncio.wait_for(ask(peer), SEED_S) for peer in reached if peer in named]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                log.debug("not a bootstrap node, or it did not answer: %r", answer)
        return [address for answer in answers if isinstance(answer, list) for address in answer]

    async def find_seeds(self) -> None:
        """Try the bootstrap peers again that did not answer so far: a bootstrap node may have been
        down. Raises NetworkError.
        """
        missing = [
            address
            for address in self.bootstrap
            if address.rpartition("/p2p/")[2] not in self._classified
        ]
        if missing and self._options.swarm is not None:
            daemon = self._supervisor.running()
            reached, _ = await self._supervisor.unless_down(
                connections.connect_any(daemon, missing, 5.0)
            )
            await self._supervisor.unless_down(
                self._ask_seeds(daemon, self._options.swarm, reached)
            )

    async def meet(self, addresses: Sequence[str]) -> None:
        """Connect to peers by full multiaddrs, and let the DHT node meet those that it does not
        know. Raises NetworkError.
        """
        from shoal.swarm.p2p.hivemind_adapter import knows, ping

        daemon = self._supervisor.running()
        dht = self._supervisor.running_dht()
        reached, _ = await self._supervisor.unless_down(
            connections.connect_any(daemon, addresses, 10.0)
        )
        self._known.learn(reached)
        for peer in reached:
            if peer not in self.seeds and not knows(dht, peer):
                with contextlib.suppress(*DAEMON_GONE, asyncio.TimeoutError):
                    await self._supervisor.unless_down(ping(dht, peer), 5.0)

    async def look_around(self) -> None:
        """Keep the addresses of this node and of its peers up to date, and search for others while
        there are none, for ever.
        """
        searched = 0.0
        for look, pause in enumerate(
            itertools.chain(LOOK_AROUND, itertools.repeat(LOOK_AROUND[-1]))
        ):
            await asyncio.sleep(pause)
            try:
                daemon = self._supervisor.running()
            except NetworkError:
                continue
            try:
                self._supervisor.addresses = await self._supervisor.unless_down(
                    daemon.addresses(), 5.0
                )
                peers = await self._supervisor.unless_down(daemon.peers(), 5.0)
                await self._look_up(daemon, peers, look)
                now = asyncio.get_running_loop().time()
                if not set(peers) - set(self.seeds) and now - searched >= ALONE:
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
        for peer in sorted(peers, key=lambda peer: self._looked_up[peer])[:LOOKED_UP]:
            with contextlib.suppress(DaemonError):  # it has just gone
                if found := await self._supervisor.unless_down(daemon.where(peer), 5.0):
                    self._known.remember(found)
                    self._looked_up[peer] = look


SLOTS_S = 5.0  # seconds between two looks at the slots at relays
BACKOFF = (
    0.1,
    0.5,
    1.0,
    2.0,
    5.0,
    10.0,
)  # seconds before each further attempt to restart the daemon; the last repeats


async def started_again(start: Callable[[], Awaitable[T]]) -> T:
    """Return what ``start`` returns once it succeeds: whatever is in the way, a node needs its
    network back.
    """
    for pause in itertools.chain(BACKOFF, itertools.repeat(BACKOFF[-1])):
        await asyncio.sleep(pause)
        try:
            return await asyncio.wait_for(start(), 60.0)
        except Exception as error:
            expected = isinstance(error, (ShoalError, *DAEMON_GONE, asyncio.TimeoutError))
            why = str(error) or type(error).__name__
            log.warning(
                "the network daemon is not back yet, trying again: %s", why, exc_info=not expected
            )
    raise AssertionError  # never: the last pause repeats


class DaemonSupervisor:
    """Call `begin` once; then ``daemon`` and ``dht`` are there, except during a restart."""

    def __init__(
        self,
        identity: Identity,
        options: HostOptions,
        known: Peerstore,
        calls: Callable[[str, int], str],
    ) -> None:
        self.daemon: Daemon | None = None
        self.dht: DHTNode | None = None
        self.addresses: tuple[str, ...] = ()  # full multiaddrs that the daemon gives for this node
        self.restarts = 0
        self.internal_errors = InternalErrors()
        self.known = known
        self.backoff = DialBackoff(options.bootstrap)
        self.known.met = self.backoff.met
        self.bootstrapper = Bootstrapper(self, identity.peer_id, options, known, calls)
        self._identity = identity
        self._options = options
        self._listen = self._wanted = tuple(options.listen)
        self.slots = RelaySlots(identity.peer_id, options.bootstrap, options.relay == "only")
        self._down: asyncio.Future[None] | None = None  # done as soon as the present daemon is gone
        self.handlers: dict[str, Incoming] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def serve(self, protocol: str, incoming: Incoming) -> None:
        """Hand streams of ``protocol`` to ``incoming``, now if the daemon runs, and again after
        each restart.

        Tries until the daemon takes it, or others would read that this node does not offer it: the
        caller sets a limit.
        """
        self.handlers[protocol] = incoming
        while (daemon := self.daemon) is not None:
            try:
                await daemon.serve(protocol, incoming)
                return
            except DAEMON_GONE as error:
                log.debug("the daemon did not take %s: %r", protocol, error)
                await asyncio.sleep(BACKOFF[0])

    def running(self) -> Daemon:
        """Return the daemon. Raises NetworkError during a restart."""
        if self.daemon is None:
            raise NetworkError("the network daemon is not running; it is being restarted.")
        return self.daemon

    def running_dht(self) -> DHTNode:
        """Return the DHT node. Raises NetworkError during a restart."""
        self.running()
        if self.dht is None:
            raise NetworkError("the DHT is not ready; it is being restarted.")
        return self.dht

    async def unless_down(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Await ``work``, but give it up the moment the daemon dies.

        Raises NetworkError; with ``timeout`` TimeoutError.
        """
        assert self._down is not None
        task = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {task, self._down}
        try:
            await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if self._down.done():
                raise NetworkError(
                    "the network daemon stopped in the middle of a call; it is being restarted."
                )
            raise TimeoutError
        finally:
            task.cancel()

    async def begin(self, timeout: float) -> None:
        """Get on the network within ``timeout`` seconds. Raises StartupError."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        inside = all(map(is_loopback, self._listen)) and not all(
            map(is_loopback, self._options.bootstrap)
        )
        if inside and not self._options.light:
            log.warning(
                "this node listens on loopback only, so peers elsewhere cannot reach it: use "
                "--listen"
            )
        self._listen = as_before(self._wanted, self.known.listened)
        try:
            await self._start(timeout, lambda daemon: self.bootstrapper.enter(daemon, end))
        except DAEMON_GONE as error:
            raise StartupError(
                f"the network daemon stopped while the node was joining ({error}): try again."
            ) from error
        self._tasks = [
            loop.create_task(self._keep_up()),
            loop.create_task(self.bootstrapper.look_around()),
        ]
        if self._options.relay != "off" and not all(map(is_loopback, self._listen)):
            self._tasks.append(loop.create_task(self._keep_slots()))

    async def _start(self, timeout: float, enter: Callable[[Daemon], Awaitable[DHTNode]]) -> None:
        """Launch a daemon, ``enter`` the swarm by it, and serve on it; if that fails it is
        ended.
        """
        try:
            check_free(self._listen)
            daemon = await self._launch(timeout)
        except ListenError:
            if self._listen == self._wanted:
                raise
            log.warning(
                "this node cannot listen on %s as before (another program may have the port), so "
                "links and invitations with that address lead to it no more: give out a new link "
                "(shoal link), or free the address and start it again",
                ", ".join(self._listen),
            )
            self._listen = self._wanted
            daemon = await self._launch(timeout)
        try:
            dht = await enter(daemon)
            self.addresses = await daemon.addresses()
            self._listen = self.known.listened = fixed_ports(self._listen, self.addresses)
            self._down = asyncio.get_running_loop().create_future()
            self.dht = dht
            self.daemon = daemon
            for protocol, incoming in list(self.handlers.items()):
                await daemon.serve(protocol, incoming)
        except BaseException:
            self.daemon = None
            await daemon.shutdown()
            raise

    async def _launch(self, timeout: float) -> Daemon:
        beyond = not all(map(is_loopback, self._listen))
        relay = self._options.relay
        announce = self._options.announce
        relays = await answering(self._options.bootstrap) if beyond and relay != "off" else []
        # What libp2p finds is not seen then.
        self.slots.needed |= not relays and relay == "auto" and not announce
        if relay == "only" and not relays:
            log.warning(
                "no bootstrap node or peer can forward to this node now, so nobody behind a NAT "
                "reaches it"
            )
        # A node that announces addresses is reached there.
        daemon = await (launch_relay if announce and relay == "auto" else Daemon.launch)(
            self._identity,
            listen=self._listen,
            announce=announce,
            relays=relays,
            relay=relay,
            light=self._options.light,
            # until the DHT node's connection is there, for which hivemind is imported first
            idle="5m",
            timeout=timeout,
        )
        daemon.backoff = self.backoff
        return daemon

    async def _keep_up(self) -> None:
        while True:
            daemon = self.running()
            status = await daemon.ended()
            log.warning("the network daemon stopped (status %s); restarting it", status)
            self.daemon = None
            self.slots.ended()
            dht = self.dht
            self.dht = None
            if dht is not None:
                dht.is_alive = False
            if self._down is not None and not self._down.done():
                self._down.set_result(None)
            await daemon.shutdown()
            await started_again(lambda: self._start(20.0, self.bootstrapper.enter_again))
            self.restarts += 1
            log.warning("the network daemon runs again (restart %d)", self.restarts)

    async def _keep_slots(self) -> None:
        while True:
            await asyncio.sleep(SLOTS_S)
            if (daemon := self.daemon) is None:
                continue
            try:
                if await self.slots.look(daemon, self.addresses):
                    log.warning("the network daemon puts off relays that answer; restarting it")
                    daemon.end_by_force()
            except DAEMON_GONE as error:
                log.debug("no relay was asked: %r", error)
            except Exception as error:  # a bug must not leave the node without its slots
                self.internal_errors.caught("network", error)

    async def end(self, timeout: float) -> None:
        """Leave the network and end the daemon, in about ``timeout`` seconds at most."""
        for task in self._tasks:
            task.cancel()
        self.known.save()
        dht = self.dht
        self.dht = None
        if dht is not None:
            with contextlib.suppress(*DAEMON_GONE, asyncio.TimeoutError):
                await asyncio.wait_for(dht.shutdown(), timeout / 2)
        if self.daemon is not None:
            await self.daemon.shutdown()
            self.daemon = None


def report(
    loop: asyncio.AbstractEventLoop, context: dict[str, Any], errors: InternalErrors | None = None
) -> None:
    """Log an exception that nothing awaited.

    When a daemon dies, hivemind leaves many broken connections behind: no warning.

    ``errors``: where one of this node's own code is counted.
    """
    error = context.get("exception")
    expected = isinstance(error, (*DAEMON_GONE, asyncio.TimeoutError)) or type(
        error
    ).__module__.startswith("hivemind.")
    log.log(logging.DEBUG if expected else logging.WARNING, "%s: %r", context.get("message"), error)
    of_others = expected or isinstance(error, (ShoalError, OSError, EOFError))
    if errors is not None and isinstance(error, Exception) and not of_others:
        errors.caught("network", error)
