"""The daemon and the DHT node on it, kept alive: when the daemon dies it is started again and joins the swarm again.

Everything here runs on the host's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from shoal.swarm.errors import NetworkError, ShoalError, StartupError
from shoal.swarm.identity import Identity
from shoal.swarm.p2p.bootstrapper import Bootstrapper
from shoal.swarm.p2p.daemon import DAEMON_GONE, Daemon, Incoming
from shoal.swarm.p2p.daemon_process import Relay
from shoal.swarm.p2p.dial import answering
from shoal.swarm.p2p.listen import as_before, check_free, fixed_ports
from shoal.swarm.p2p.multiaddr import is_loopback
from shoal.swarm.p2p.peerstore import DialBackoff, Peerstore
from shoal.swarm.p2p.relay_slots import RelaySlots, launch_relay

if TYPE_CHECKING:
    from hivemind.dht.node import DHTNode

log = logging.getLogger(__name__)

T = TypeVar("T")

SLOTS_S = 5.0  # seconds between two looks at the slots at relays
BACKOFF = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)  # seconds before each further attempt to restart the daemon; the last repeats


class DaemonSupervisor:
    """Call `begin` once; then ``daemon`` and ``dht`` are there, except during a restart.

    ``calls``: returns why a peer's call to the DHT node is refused. The other arguments are those of `Host.start`.
    """

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
        self._addresses: tuple[str, ...] = ()
        self.restarts = 0
        self.known = Peerstore(identity.peer_id) if known is None else known
        self.backoff = DialBackoff(bootstrap)
        self.known.met = self.backoff.met
        self.bootstrapper = Bootstrapper(
            self,
            identity.peer_id,
            bootstrap=bootstrap,
            known=self.known,
            swarm=swarm,
            must_join=must_join,
            validator=validator,
            light=light,
            calls=calls,
        )
        self._identity = identity
        self._listen = self._wanted = tuple(listen)
        self._announce = tuple(announce)
        self._light = light
        self._relay = relay
        self._slots = RelaySlots(identity.peer_id, bootstrap, relay == "only")
        self._down: asyncio.Future[None] | None = None  # done as soon as the present daemon is gone
        self.handlers: dict[str, Incoming] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def serve(self, protocol: str, incoming: Incoming) -> None:
        """Hand streams of ``protocol`` to ``incoming``, now if the daemon runs, and again after each restart.

        Tries until the daemon takes it, or others would read that this node does not offer it: the caller sets a limit.
        """
        self.handlers[protocol] = incoming
        while (daemon := self.daemon) is not None:
            try:
                await daemon.serve(protocol, incoming)
                return
            except DAEMON_GONE as error:
                log.debug("the daemon did not take %s: %r", protocol, error)
                await asyncio.sleep(BACKOFF[0])

    @property
    def addresses(self) -> tuple[str, ...]:
        """Full multiaddrs under which others reach this node, those by relays last."""
        return tuple(dict.fromkeys((*self._addresses, *self._slots.addresses())))

    @addresses.setter
    def addresses(self, found: tuple[str, ...]) -> None:
        self._addresses = found

    @property
    def moves(self) -> int:
        """How often this machine was taken to another network."""
        return self._slots.moves

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

    async def unless_down(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        """Await ``work``, but give it up the moment the daemon dies. Raises NetworkError or asyncio.TimeoutError."""
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
        if not self._light and all(map(is_loopback, self._listen)) and not all(map(is_loopback, self.bootstrapper.bootstrap)):
            log.warning("this node listens on loopback only, so peers elsewhere cannot reach it: use --listen")
        self._listen = as_before(self._wanted, self.known.listened)
        daemon = await self._launch(timeout)
        try:
            dht = await self.bootstrapper.enter(daemon, end)
            await self._settle(daemon, dht)
        except BaseException as error:
            self.daemon = None
            await daemon.shutdown()
            if isinstance(error, DAEMON_GONE):
                raise StartupError(f"the network daemon stopped while the node was joining ({error}): try again.") from error
            raise
        self._tasks = [loop.create_task(self._keep_up()), loop.create_task(self.bootstrapper.look_around())]
        if self._relay != "off" and not all(map(is_loopback, self._listen)):
            self._tasks.append(loop.create_task(self._keep_slots()))

    async def _launch(self, timeout: float) -> Daemon:
        beyond = not all(map(is_loopback, self._listen))
        relays = await answering(self.bootstrapper.bootstrap) if beyond and self._relay != "off" else []
        self._slots.needed |= not relays and self._relay == "auto" and not self._announce  # what libp2p finds is not seen then
        if self._relay == "only" and not relays:
            log.warning("no bootstrap node or peer can forward to this node now, so nobody behind a NAT reaches it")
        # A node that announces addresses is reached there.
        daemon = await (launch_relay if self._announce and self._relay == "auto" else Daemon.launch)(
            self._identity,
            listen=self._listen,
            announce=self._announce,
            relays=relays,
            relay=self._relay,
            light=self._light,
            idle="5m",  # until the DHT node's connection is there, for which hivemind is imported first
            timeout=timeout,
        )
        daemon.backoff = self.backoff
        return daemon

    async def _settle(self, daemon: Daemon, dht: DHTNode) -> None:
        self.addresses = await daemon.addresses()
        self._listen = self.known.listened = fixed_ports(self._listen, self.addresses)
        self._down = asyncio.get_running_loop().create_future()
        self.dht, self.daemon = dht, daemon
        for protocol, incoming in list(self.handlers.items()):
            await daemon.serve(protocol, incoming)

    async def _keep_up(self) -> None:
        """Restart the daemon whenever it ends."""
        while True:
            daemon = self.running()
            status = await daemon.ended()
            log.warning("the network daemon stopped (status %s); restarting it", status)
            self.daemon = None
            self._slots.ended()
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

    async def _keep_slots(self) -> None:
        """Keep the slots at relays of a node that nobody can dial."""
        while True:
            await asyncio.sleep(SLOTS_S)
            if (daemon := self.daemon) is None:
                continue
            try:
                if await self._slots.look(daemon, self._addresses):
                    log.warning("the network daemon puts off relays that answer; restarting it")
                    daemon.end_by_force()
            except DAEMON_GONE as error:
                log.debug("no relay was asked: %r", error)
            except Exception:  # a bug must not leave the node without its slots
                log.warning("asking the relays failed; trying again", exc_info=True)

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
            await self._settle(daemon, await self.bootstrapper.enter_again(daemon))
        except BaseException:
            self.daemon = None
            await daemon.shutdown()
            raise
        self.restarts += 1
        log.warning("the network daemon runs again (restart %d)", self.restarts)

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


def report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an exception that nothing awaited. When a daemon dies, hivemind leaves many broken connections behind: no warning."""
    error = context.get("exception")
    expected = isinstance(error, (*DAEMON_GONE, asyncio.TimeoutError)) or type(error).__module__.startswith("hivemind.")
    log.log(logging.DEBUG if expected else logging.WARNING, "%s: %r", context.get("message"), error)
