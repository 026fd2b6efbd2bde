"""The daemon and the DHT node on it, kept alive: when the daemon dies it is started again and joins
the swarm again. Everything here runs on the host's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from shoal.swarm.errors import ListenError, NetworkError, StartupError
from shoal.swarm.identity import Identity
from shoal.swarm.internal_errors import InternalErrors
from shoal.swarm.p2p.addresses import is_loopback
from shoal.swarm.p2p.bootstrapper import Bootstrapper, HostOptions
from shoal.swarm.p2p.connections import answering
from shoal.swarm.p2p.daemon import DAEMON_GONE, Daemon, Incoming
from shoal.swarm.p2p.daemon_restart import BACKOFF_S, started_again
from shoal.swarm.p2p.dial_backoff import DialBackoff
from shoal.swarm.p2p.listening import as_before, check_free, fixed_ports
from shoal.swarm.p2p.peerstore import Peerstore
from shoal.swarm.p2p.relay_slots import RelaySlots, launch_relay
from shoal.swarm.p2p.resource_manager import ResourceManager

if TYPE_CHECKING:
    from hivemind.dht.node import DHTNode

log = logging.getLogger(__name__)

T = TypeVar("T")

SLOTS_S = 5.0
"""Between two looks at the slots at relays."""
RESTART_S = 20.0
"""For the daemon to be started again."""


class DaemonSupervisor:
    """Call `begin` once; then ``daemon`` and ``dht`` are there, except during a restart."""

    def __init__(
        self,
        identity: Identity,
        options: HostOptions,
        known: Peerstore,
        resource_manager: ResourceManager,
    ) -> None:
        self.daemon: Daemon | None = None
        self.dht: DHTNode | None = None
        self.addresses: tuple[str, ...] = ()  # full multiaddrs that the daemon gives for this node
        self.restarts = 0
        self.internal_errors = InternalErrors()
        self.known = known
        self.backoff = DialBackoff(options.bootstrap)
        self.known.met = self.backoff.met
        self.bootstrapper = Bootstrapper(self, identity.peer_id, options, known, resource_manager)
        self._identity = identity
        self._options = options
        self._listen = tuple(options.listen)
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
        while self.daemon is not None:
            try:
                await self.daemon.serve(protocol, incoming)
                return
            except DAEMON_GONE as error:
                log.debug("the daemon did not take %s: %r", protocol, error)
                await asyncio.sleep(BACKOFF_S[0])

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
        swarm_is_elsewhere = not all(map(is_loopback, self._options.bootstrap))
        if self._is_on_loopback() and swarm_is_elsewhere and not self._options.light:
            log.warning(
                "this node listens on loopback only, so peers elsewhere cannot reach it: use "
                "--listen"
            )
        self._listen = as_before(tuple(self._options.listen), self.known.listened)
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
        if self._options.relay != "off" and not self._is_on_loopback():
            self._tasks.append(loop.create_task(self._keep_slots()))

    async def _start(self, timeout: float, enter: Callable[[Daemon], Awaitable[DHTNode]]) -> None:
        """Launch a daemon, ``enter`` the swarm by it, and serve on it; if that fails it is
        ended.
        """
        try:
            check_free(self._listen)
            daemon = await self._launch(timeout)
        except ListenError:
            wanted = tuple(self._options.listen)
            if self._listen == wanted:
                raise
            log.warning(
                "this node cannot listen on %s as before (another program may have the port), so "
                "links and invitations with that address lead to it no more: give out a new link "
                "(shoal link), or free the address and start it again",
                ", ".join(self._listen),
            )
            self._listen = wanted
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
        relay = self._options.relay
        announce = self._options.announce
        relays = []
        if relay != "off" and not self._is_on_loopback():
            relays = await answering(self._options.bootstrap)
        # What libp2p finds is not seen then.
        self.slots.needed |= not relays and relay == "auto" and not announce
        if relay == "only" and not relays:
            log.warning(
                "no bootstrap node or peer can forward to this node now, so nobody behind a NAT "
                "reaches it"
            )
        launch = Daemon.launch
        if announce and relay == "auto":
            launch = launch_relay  # a node that announces addresses is reached there
        daemon = await launch(
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

    def _is_on_loopback(self) -> bool:
        """Return whether only processes of this machine can reach this node."""
        return all(map(is_loopback, self._listen))

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
            await started_again(lambda: self._start(RESTART_S, self.bootstrapper.enter_again))
            self.restarts += 1
            log.warning("the network daemon runs again (restart %d)", self.restarts)

    async def _keep_slots(self) -> None:
        while True:
            await asyncio.sleep(SLOTS_S)
            daemon = self.daemon
            if daemon is None:
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
