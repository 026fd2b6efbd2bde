"""The node's place on the network: one thread, one asyncio loop, one p2pd with GossipSub on, one DHT node; a plain façade.

Everything that waits for the network runs on the loop of this thread; the rest of the program calls `Host.call` or leaves a
coroutine with `Host.submit`. When the daemon dies it is started again with the same identity, port and handlers; until then
every call fails at once with NetworkError, so callers need to know nothing about it.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from types import TracebackType
from typing import Any, TypeVar

from hivemind.dht.node import DHTNode
from hivemind.p2p import P2PDaemonError
from hivemind.utils.timed_storage import get_dht_time

from swarm import bootstrap as boot
from swarm.daemon import Daemon, is_loopback, join_dht, met
from swarm.errors import NetworkError, ShoalError, StartupError
from swarm.identity import Identity
from swarm.stream import Stream, Traffic, short

log = logging.getLogger(__name__)

Handler = Callable[[Stream], Awaitable[None]]
T = TypeVar("T")

MAX_VALUE = 64 * 1024  # bytes of one DHT record: larger ones are lost, or stall others
MAX_HANDLERS = 64  # incoming streams served at once
MAX_HANDLERS_PER_PEER = 8
MAX_KNOWN = 64  # peers whose addresses are kept for the next restart of the daemon
LINGER = 2.0  # seconds an answered stream waits for the caller to end it
DHT_TIMEOUT = 10.0  # seconds for one store or get
LOOK_AROUND = 5.0  # seconds between looks at who is connected
BACKOFF = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)  # seconds before each further attempt to restart the daemon; the last repeats


class Host:
    """See `start`. Methods are for any thread but the host's own; coroutines are for the host's loop only."""

    def __init__(self, identity: Identity, listen: Sequence[str], announce: Sequence[str], light: bool) -> None:
        self.peer_id = identity.peer_id
        self.traffic = Traffic()
        self.restarts = 0
        self._identity = identity
        self._listen = self._wanted = tuple(listen)
        self._announce = tuple(announce)
        self._light = light
        self._bootstrap: tuple[str, ...] = ()
        self._validator: Any = None
        self._owner = os.getpid()
        self._closed = False
        self._daemon: Daemon | None = None
        self._dht: DHTNode | None = None
        self._down: asyncio.Future[None] | None = None  # done as soon as the present daemon is gone
        self._addresses: tuple[str, ...] = ()
        self._known: dict[str, tuple[str, ...]] = {}
        self._handlers: dict[str, Handler] = {}
        self._busy: Counter[str] = Counter()
        self._tasks: list[asyncio.Task[None]] = []
        self._loop = asyncio.SelectorEventLoop()
        self._loop.set_exception_handler(_report)
        self._thread = threading.Thread(target=self._loop.run_forever, name="shoal-host", daemon=True)

    @classmethod
    def start(
        cls,
        identity: Identity,
        *,
        listen: Sequence[str] = ("/ip4/127.0.0.1/tcp/0",),
        announce: Sequence[str] = (),
        bootstrap: Sequence[str] = (),
        timeout: float = 30.0,
        validator: Any = None,
        light: bool = False,
    ) -> Host:
        """Get on the network within ``timeout`` seconds.

        ``listen``: multiaddrs to listen on (port 0: any). ``announce``: addresses to tell others instead of those.
        ``bootstrap``: full multiaddrs of nodes to join; one that answers is enough. ``validator``: a hivemind record validator
        for everything stored in the DHT. ``light``: use the DHT but store nothing for others.

        Raises StartupError: binary missing or unfit, port taken, none of the bootstrap peers reachable (each with its
        reason), or out of time. Nothing is left running then.
        """
        boot.check_free(listen)
        if announce:  # the daemon tells only the announced addresses, never the port it obtained
            listen = boot.obtain_ports(listen)
        host = cls(identity, listen, announce, light)
        host._bootstrap = tuple(bootstrap)
        host._validator = validator
        host._thread.start()
        atexit.register(host.close)
        try:
            host.call(host._begin(timeout), timeout + 5.0)
        except BaseException as error:
            host.close()
            if isinstance(error, NetworkError):
                raise StartupError(f"the node did not get on the network within {timeout:g} s: try again.") from error
            raise
        return host

    # -- any thread ------------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether the daemon runs now."""
        return self._daemon is not None and not self._closed

    def addresses(self) -> tuple[str, ...]:
        """Full multiaddrs (``.../p2p/ID``) under which others reach this node, those beyond this machine first."""
        return self._addresses

    def call(self, coroutine: Coroutine[Any, Any, T], timeout: float) -> T:
        """Run a coroutine on the host's loop and wait for its result, at most ``timeout`` seconds.

        Raises what the coroutine raises; NetworkError when time is up (the coroutine is cancelled) or the host is closed.
        """
        future = self.submit(coroutine)
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError:
            if future.done() and not future.cancelled():
                return future.result()  # it came in at the last moment, or raised a TimeoutError of its own
            raise NetworkError(f"a network call took longer than {timeout:.3g} s and was given up.") from None
        except concurrent.futures.CancelledError:
            raise NetworkError("the network call was cancelled because the host is closing.") from None
        finally:
            future.cancel()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine on the host's loop. NetworkError if the host is closed."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("Host.call and Host.submit are not for the host's own thread: await the coroutine there")
        if self._closed:
            coroutine.close()
            raise NetworkError("the host is closed.")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def serve(self, protocol: str, handler: Handler) -> None:
        """Answer incoming streams of ``protocol`` with ``handler``, which may raise: that is logged and ends the stream.

        At most 64 streams are served at once, 8 per peer; more are refused. When the handler returns, the stream stays open
        until the caller ends it (at most 2 s), so that nothing sent is lost.
        """
        self._handlers[protocol] = handler
        with contextlib.suppress(NetworkError):  # no daemon just now: the restart registers it
            self.call(self._register(protocol), 5.0)

    def remember(self, addresses: Iterable[str]) -> None:
        """Addresses of peers by which to find the swarm again after the daemon has died."""
        for address in addresses:
            peer = address.rpartition("/p2p/")[2]
            old = self._known.pop(peer, ())
            self._known[peer] = tuple(dict.fromkeys((address, *old)))[:4]
        for peer in list(self._known)[:-MAX_KNOWN]:
            self._known.pop(peer, None)

    def close(self, timeout: float = 5.0) -> None:
        """Leave the network and end the daemon, at most ``timeout`` seconds. May be called again."""
        if self._closed or self._owner != os.getpid():  # a forked copy must not end what is not its own
            return
        self._closed = True
        atexit.unregister(self.close)
        if not self._thread.is_alive():
            self._loop.close()
            return
        ending = asyncio.run_coroutine_threadsafe(self._end(timeout * 0.6), self._loop)
        try:
            ending.result(timeout * 0.8)
        except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
            log.warning("the network did not close within %.3g s; its daemon is ended by force", timeout)
        daemon = self._daemon
        if daemon is not None:  # the loop hangs: the guard takes the daemon down
            daemon._terminate()
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout * 0.2)
        if not self._thread.is_alive():
            self._loop.close()

    def __enter__(self) -> Host:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- on the loop -----------------------------------------------------------------------------------------------------

    async def open(self, peer_id: str, protocol: str, *, addresses: Sequence[str] = (), timeout: float) -> Stream:
        """A stream to ``peer_id``, found by ``addresses`` if given, else by what the daemon knows. NetworkError."""
        daemon = self._running()

        async def work() -> Stream:
            if addresses:
                # One good address is enough, and a peer that we are connected to needs none: opening decides.
                with contextlib.suppress(P2PDaemonError, ValueError):
                    await daemon.connect(peer_id, addresses)
            reader, writer = await daemon.open(peer_id, protocol)
            return Stream(peer_id, reader, writer, self.traffic)

        try:
            return await self._unless_down(work(), timeout)
        except P2PDaemonError as error:
            text = str(error)
            if "protocols not supported" in text:
                raise NetworkError(
                    f"peer {short(peer_id)} does not offer {protocol}: it is not ready, or its shoal is of another version."
                ) from None
            raise NetworkError(f"peer {short(peer_id)} {boot.why(error, addresses[0] if addresses else '')}.") from None
        except (OSError, EOFError, ValueError) as error:
            raise NetworkError(f"cannot open a stream to peer {short(peer_id)} ({error}).") from None
        except asyncio.TimeoutError:
            raise NetworkError(f"peer {short(peer_id)} did not open a stream within {timeout:.3g} s.") from None

    async def store(self, key: str, subkey: str, value: bytes, ttl: float) -> bool:
        """Put ``value`` (at most 64 KiB, else ValueError) into the DHT for ``ttl`` seconds; False if nobody took it."""
        if len(value) > MAX_VALUE:
            raise ValueError(f"a DHT record of {len(value)} bytes: at most {MAX_VALUE} are allowed")
        dht = self._running_dht()
        return bool(await self._dht_call(dht.store(key, value, get_dht_time() + ttl, subkey=subkey)))

    async def get(self, key: str) -> dict[str, bytes]:
        """The live values under ``key``: subkey -> value. They passed the validator, if the host has one."""
        found = await self._dht_call(self._running_dht().get(key, latest=True))
        if found is None or not isinstance(found.value, dict):
            return {}
        return {
            subkey: item.value
            for subkey, item in found.value.items()
            if isinstance(subkey, str) and isinstance(item.value, bytes) and len(item.value) <= MAX_VALUE
        }

    async def _dht_call(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await self._unless_down(work, DHT_TIMEOUT)
        except asyncio.TimeoutError:
            raise NetworkError(f"the DHT did not answer within {DHT_TIMEOUT:g} s.") from None
        except (P2PDaemonError, OSError, EOFError) as error:
            raise NetworkError(f"the DHT could not be asked ({error}).") from None

    async def _unless_down(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
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

    def _running(self) -> Daemon:
        if self._daemon is None:
            raise NetworkError("the network daemon is not running; it is being restarted.")
        return self._daemon

    def _running_dht(self) -> DHTNode:
        self._running()
        if self._dht is None:
            raise NetworkError("the DHT is not ready; it is being restarted.")
        return self._dht

    async def _begin(self, timeout: float) -> None:
        end = self._loop.time() + timeout
        if self._bootstrap and not self._light and all(is_loopback(a) for a in self._listen):
            far = [a for a in self._bootstrap if not is_loopback(a)]
            if far:
                log.warning("this node listens on loopback only, so peers elsewhere cannot reach it: use --listen")
        daemon = await self._launch(timeout)
        try:
            reached, failed = await boot.connect_any(daemon, self._bootstrap, max(0.1, end - self._loop.time()))
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
        except BaseException:
            self._daemon = None
            await daemon.shutdown()
            raise
        self._tasks = [self._loop.create_task(self._keep_up()), self._loop.create_task(self._look_around())]

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
        self._addresses = await daemon.addresses()
        self._listen = boot.fixed_ports(self._listen, self._addresses)
        self._down = self._loop.create_future()
        self._dht, self._daemon = dht, daemon
        for protocol in list(self._handlers):
            await self._register(protocol)

    async def _keep_up(self) -> None:
        """Restart the daemon whenever it ends."""
        while True:
            daemon = self._running()
            status = await daemon.ended()
            log.warning("the network daemon stopped (status %s); restarting it", status)
            self._daemon = None
            dht, self._dht = self._dht, None
            if dht is not None:
                dht.is_alive = False
            if self._down is not None and not self._down.done():
                self._down.set_result(None)
            await daemon.shutdown()
            attempt = 0
            while self._daemon is None:
                await asyncio.sleep(BACKOFF[min(attempt, len(BACKOFF) - 1)])
                attempt += 1
                try:
                    await asyncio.wait_for(self._again(), 60.0)
                except (ShoalError, P2PDaemonError, OSError, EOFError, asyncio.TimeoutError) as error:
                    log.warning("the network daemon could not be restarted, trying again: %s", error or "timed out")

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
            self._daemon = None
            await daemon.shutdown()
            raise
        self.restarts += 1
        log.warning("the network daemon runs again (restart %d)", self.restarts)

    async def _look_around(self) -> None:
        """Keep the own addresses and those of the peers up to date."""
        while True:
            await asyncio.sleep(LOOK_AROUND)
            daemon = self._daemon
            if daemon is None:
                continue
            try:
                self._addresses = await self._unless_down(daemon.addresses(), 5.0)
                for addresses in (await self._unless_down(daemon.peers(), 5.0)).values():
                    self.remember(addresses)
            except (NetworkError, P2PDaemonError, OSError, EOFError, ValueError, asyncio.TimeoutError) as error:
                log.debug("the daemon was not asked for its peers: %r", error)

    async def _register(self, protocol: str) -> None:
        daemon = self._running()

        async def incoming(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._answer(protocol, Stream(info.peer_id.to_base58(), reader, writer, self.traffic))

        await daemon.add_binary_stream_handler(protocol, incoming)

    async def _answer(self, protocol: str, stream: Stream) -> None:
        peer = stream.peer_id
        if self._closed or self._busy.total() >= MAX_HANDLERS or self._busy[peer] >= MAX_HANDLERS_PER_PEER:
            log.debug("refused a stream %s of peer %s: too many are open", protocol, short(peer))
            stream.abort()
            return
        self._busy[peer] += 1
        try:
            await self._handlers[protocol](stream)
            await stream.drained(LINGER)
        except ShoalError as error:
            log.debug("%s with peer %s ended: %s", protocol, short(peer), error)
        except asyncio.CancelledError:
            stream.abort()
            raise
        except Exception:
            log.warning("answering %s of peer %s failed", protocol, short(peer), exc_info=True)
        finally:
            stream.close()
            self._busy[peer] -= 1
            if not self._busy[peer]:
                del self._busy[peer]

    async def _end(self, timeout: float) -> None:
        for task in self._tasks:
            task.cancel()
        daemon, dht, self._dht = self._daemon, self._dht, None
        if dht is not None:
            with contextlib.suppress(P2PDaemonError, OSError, EOFError, asyncio.TimeoutError):
                await asyncio.wait_for(dht.shutdown(), timeout / 3)
        if daemon is not None:
            await daemon.shutdown()
            self._daemon = None
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=timeout / 3)


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What nobody awaited. When a daemon dies, hivemind leaves many broken connections behind: no news."""
    error = context.get("exception")
    expected = isinstance(error, (P2PDaemonError, OSError, EOFError, asyncio.TimeoutError))
    log.log(logging.DEBUG if expected else logging.WARNING, "%s: %r", context.get("message"), error)
