"""The daemon and the DHT node on it, kept alive: found dead, they are started again and the swarm is looked up again.

Everything here runs on the host's loop, except `Uplink.remember`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from hivemind.dht.node import DHTNode
from hivemind.p2p import P2PDaemonError

from swarm import bootstrap as boot
from swarm.daemon import Daemon, is_loopback, join_dht, met
from swarm.errors import NetworkError, ShoalError, StartupError
from swarm.identity import Identity

log = logging.getLogger(__name__)

T = TypeVar("T")
Incoming = Callable[[str, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]  # the first: who opened it

DAEMON_GONE = (P2PDaemonError, OSError, EOFError)  # what hivemind's calls raise when the daemon is dead, or refuses
MAX_KNOWN = 64  # peers whose addresses are kept for the next restart of the daemon
LOOK_AROUND = (0.5, 1.0, 2.0, 5.0)  # seconds before each further look at who is connected; the last repeats
BACKOFF = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)  # seconds before each further attempt to restart the daemon; the last repeats


class Uplink:
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
    ) -> None:
        self.daemon: Daemon | None = None
        self.dht: DHTNode | None = None
        self.addresses: tuple[str, ...] = ()
        self.restarts = 0
        self._identity = identity
        self._listen = self._wanted = tuple(listen)
        self._announce = tuple(announce)
        self._bootstrap = tuple(bootstrap)
        self._validator = validator
        self._light = light
        self._down: asyncio.Future[None] | None = None  # done as soon as the present daemon is gone
        self._known: dict[str, tuple[str, ...]] = {}
        self._handlers: dict[str, Incoming] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def serve(self, protocol: str, incoming: Incoming) -> None:
        """Hand streams of ``protocol`` to ``incoming``, now if the daemon runs, and again after each restart."""
        self._handlers[protocol] = incoming
        if self.daemon is not None:
            await self._register(self.daemon, protocol)

    async def _register(self, daemon: Daemon, protocol: str) -> None:
        async def incoming(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            peer = info.peer_id.to_base58()
            if peer not in self._known:
                self.remember([f"{info.addr}/p2p/{peer}"])
            await self._handlers[protocol](peer, reader, writer)

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

    def remember(self, addresses: Iterable[str]) -> None:
        """Addresses of peers by which to find the swarm again after the daemon has died."""
        for address in addresses:
            peer = address.rpartition("/p2p/")[2]
            old = self._known.pop(peer, ())
            self._known[peer] = tuple(dict.fromkeys((address, *old)))[:4]
        for peer in list(self._known)[:-MAX_KNOWN]:
            self._known.pop(peer, None)

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
        daemon = await self._launch(timeout)
        try:
            reached, failed = await boot.connect_any(daemon, self._bootstrap, max(0.1, end - loop.time()))
            if self._bootstrap and not reached:
                raise boot.unreachable(failed)
            for address, reason in failed.items():
                log.warning("bootstrap peer %s %s", address, reason)
            dht = await join_dht(daemon, reached, self._validator, self._light)
            if reached and not met(dht):
                raise StartupError(
                    f"{', '.join(reached)} answered but does not hold the swarm's records: it may be stopping, or of another "
                    "version; get a new link."
                )
            await self._settle(daemon, dht)
        except BaseException as error:
            self.daemon = None
            await daemon.shutdown()
            if isinstance(error, DAEMON_GONE):
                raise StartupError(f"the network daemon stopped while the node was joining ({error}): try again.") from error
            raise
        self._tasks = [loop.create_task(self._keep_up()), loop.create_task(self._look_around())]

    async def _launch(self, timeout: float) -> Daemon:
        return await Daemon.launch(
            self._identity,
            listen=self._listen,
            announce=self._announce,
            relays=self._bootstrap,
            light=self._light,
            timeout=timeout,
        )

    async def _settle(self, daemon: Daemon, dht: DHTNode) -> None:
        self.addresses = await daemon.addresses()
        self._listen = boot.fixed_ports(self._listen, self.addresses)
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
            boot.check_free(self._listen)
        except StartupError:
            if self._listen == self._wanted:
                raise
            boot.check_free(self._wanted)  # any port was wanted, so the lost one is no loss
            self._listen = self._wanted
        daemon = await self._launch(20.0)
        try:
            known = (address for addresses in list(self._known.values()) for address in addresses)
            find = list(dict.fromkeys((*self._bootstrap, *known)))
            reached, _ = await boot.connect_any(daemon, find, 5.0)
            if find and not reached:
                log.warning("none of the %d known addresses answers after the restart; waiting to be found", len(find))
            await self._settle(daemon, await join_dht(daemon, reached, self._validator, self._light))
        except BaseException:
            self.daemon = None
            await daemon.shutdown()
            raise
        self.restarts += 1
        log.warning("the network daemon runs again (restart %d)", self.restarts)

    async def _look_around(self) -> None:
        """Keep the own addresses and those of the peers up to date."""
        for look in itertools.count():
            await asyncio.sleep(LOOK_AROUND[min(look, len(LOOK_AROUND) - 1)])
            daemon = self.daemon
            if daemon is None:
                continue
            try:
                self.addresses = await self.unless_down(daemon.addresses(), 5.0)
                for addresses in (await self.unless_down(daemon.peers(), 5.0)).values():
                    self.remember(addresses)
            except (NetworkError, *DAEMON_GONE, ValueError, asyncio.TimeoutError) as error:
                log.debug("the daemon was not asked for its peers: %r", error)

    async def end(self, timeout: float) -> None:
        """Leave the network and end the daemon, in about ``timeout`` seconds at most."""
        for task in self._tasks:
            task.cancel()
        dht, self.dht = self.dht, None
        if dht is not None:
            with contextlib.suppress(*DAEMON_GONE, asyncio.TimeoutError):
                await asyncio.wait_for(dht.shutdown(), timeout / 2)
        if self.daemon is not None:
            await self.daemon.shutdown()
            self.daemon = None
