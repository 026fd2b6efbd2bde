"""The network interface of a node: one thread with one asyncio loop, one p2pd, and one DHT node.

Everything that waits for the network runs on the loop of this thread; the rest of the program calls
`Host.call` or hands a coroutine to `Host.submit`. When the daemon dies it is started again with the
same identity, port and handlers; until then every call fails at once with NetworkError, so callers
need no code for it.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import importlib
import logging
import os
import threading
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import uvloop

from shoal.swarm.access.policy import AccessPolicy
from shoal.swarm.errors import NetworkError, ShoalError, StartupError
from shoal.swarm.identity import Identity
from shoal.swarm.p2p import connections
from shoal.swarm.p2p.addresses import is_loopback
from shoal.swarm.p2p.bootstrapper import HostOptions
from shoal.swarm.p2p.daemon import (
    DAEMON_GONE,
    Daemon,
    DaemonError,
    PutOffError,
    messages,
)
from shoal.swarm.p2p.daemon_process import Relay
from shoal.swarm.p2p.daemon_restart import report
from shoal.swarm.p2p.daemon_supervisor import DaemonSupervisor
from shoal.swarm.p2p.listening import check_announced, check_free, obtain_ports
from shoal.swarm.p2p.peerstore import Peerstore
from shoal.swarm.p2p.punch import PUNCH_PROTOCOL, Puncher
from shoal.swarm.p2p.resource_manager import ResourceManager
from shoal.swarm.p2p.seen_address import tell_seen
from shoal.swarm.p2p.stream import Stream, short
from shoal.swarm.p2p.tasks import running
from shoal.swarm.pacing.bandwidth import BandwidthLimiter
from shoal.swarm.pacing.meter import TrafficMeter
from shoal.swarm.pacing.pacer import Pacer
from shoal.swarm.pacing.pings import PING_BYTES, Echo
from shoal.swarm.wire.envelope import MAX_ADDRESS
from shoal.swarm.wire.messages import SEEN_PROTOCOL

log = logging.getLogger(__name__)

Handler = Callable[[Stream], Awaitable[None]]
Introduce = Callable[[str, str, Sequence[str], float], Awaitable[None]]
T = TypeVar("T")

MAX_VALUE_BYTES = 64 * 1024  # of one DHT record: larger ones are lost, or stall others
LINGER_S = 2.0  # an answered stream waits for the caller to end it
PING_PROTOCOL = "/ipfs/ping/1.0.0"
ECHO_S = 3.0  # to open a stream of it
SERVE_S = 30.0  # for the daemon to take a protocol
DHT_S = 10.0  # for one store or get
HANG_UP_S = 5.0  # for the daemon to end the connections to a peer


class Host:
    """A libp2p host; see `start`.

    Methods are for any thread but the host's own; coroutines are for the host's loop only.
    """

    def __init__(
        self,
        peer_id: str,
        supervisor: DaemonSupervisor,
        resource_manager: ResourceManager,
        upload: BandwidthLimiter | None,
    ) -> None:
        self.peer_id = peer_id
        self._submitted: set[concurrent.futures.Future[Any]] = set()
        self.traffic = TrafficMeter(upload, Pacer(self._echo))
        self.resource_manager = resource_manager
        self.internal_errors = supervisor.internal_errors
        """Errors of this node's own code that it survived."""
        self.introduce: Introduce | None = None
        """Awaited before a stream is opened, with peer, protocol, addresses and timeout; raises
        NetworkError to prevent it.
        """
        self.met: Mapping[str, str] = supervisor.backoff.met
        resource_manager.met = self.met
        self.puncher = Puncher(supervisor, peer_id, resource_manager, self.traffic)
        self._supervisor = supervisor
        self._hung_up: set[str] = set()  # peers whose connections are being ended
        self._lock = contextlib.ExitStack()
        self._owner = os.getpid()
        self._closed = False
        self._loop = uvloop.new_event_loop()
        self._loop.set_exception_handler(partial(report, errors=self.internal_errors))
        self._thread = threading.Thread(target=self._run_loop, name="shoal-host", daemon=True)

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
        relay: Relay = "auto",
        swarm: str | None = None,
        known: Path | None = None,
        must_join: bool = True,
        access_policy: AccessPolicy | None = None,
        upload: float = 0.0,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> Host:
        """Get on the network within ``timeout`` seconds.

        ``listen``: multiaddrs (port 0: any). ``announce``: addresses to give to others instead.
        ``bootstrap``: full multiaddrs of nodes to join; one that answers is enough. ``validator``:
        of hivemind, for everything stored in the DHT. ``light``: store nothing for others.
        ``relay``: see `daemon_process.options`. ``swarm``: bootstrap nodes are asked for its
        members. ``known``: a file of addresses of its peers, tried like ``bootstrap``.
        ``must_join`` False: no peer need answer. ``access_policy``: the peers that this node meets.
        ``upload``: bytes in a second that it sends at most; 0: no limit. ``meanwhile``: called
        while the daemon starts and dials, as to import what is slow to.

        A key file is locked until `close`: InUseError if another node has it. Raises StartupError
        with the reason; nothing is left running then.
        """
        with contextlib.ExitStack() as lock:
            lock.enter_context(identity.lock())
            check_free(listen)
            check_announced(announce, identity.peer_id)
            if announce:
                # The daemon reports only the announced addresses, never the port it obtained.
                listen = obtain_ports(listen)
            held = lock.pop_all()
        resource_manager = ResourceManager(access_policy)
        options = HostOptions(
            listen, announce, bootstrap, validator, light, relay, swarm, must_join
        )
        supervisor = DaemonSupervisor(
            identity, options, Peerstore(identity.peer_id, known, swarm), resource_manager
        )
        host = cls(
            identity.peer_id,
            supervisor,
            resource_manager,
            BandwidthLimiter(upload) if upload else None,
        )
        host._lock = held
        host._thread.start()
        atexit.register(host.close)
        try:
            messages()  # no other thread imports anything meanwhile
            begun = host.submit(supervisor.begin(timeout))
            meanwhile()
            importlib.import_module("shoal.swarm.p2p.hivemind_adapter")  # with torch: seconds
            host._loop.call_soon_threadsafe(supervisor.bootstrapper.hivemind_loaded.set)
            host.call(
                asyncio.wait_for(asyncio.wrap_future(begun, loop=host._loop), None), timeout + 5.0
            )
            if relay != "off" and not all(map(is_loopback, listen)):
                host.serve(SEEN_PROTOCOL, lambda stream: tell_seen(supervisor.running(), stream))
                host.serve(PUNCH_PROTOCOL, host.puncher.answer)
                host.submit(host.puncher.run())
        except BaseException as error:
            host.close()
            if isinstance(error, NetworkError):
                raise StartupError(
                    f"the node did not get on the network within {timeout:g} s: try again."
                ) from error
            raise
        return host

    # -- any thread --------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self._supervisor.daemon is not None and not self._closed

    @property
    def restarts(self) -> int:
        return self._supervisor.restarts

    def addresses(self) -> tuple[str, ...]:
        """Return full multiaddrs under which others reach this node, those beyond this machine
        first, and by relays last.

        One that no message can hold, as by a relay with a very long name, is left out.
        """
        found = dict.fromkeys((*self._supervisor.addresses, *self._supervisor.slots.addresses()))
        return tuple(address for address in found if len(address) <= MAX_ADDRESS)

    def call(self, coroutine: Coroutine[Any, Any, T], timeout: float) -> T:
        """Run a coroutine on the host's loop and wait for its result, at most ``timeout`` seconds.

        Raises the exceptions of the coroutine; NetworkError when time is up (the coroutine is
        cancelled) or the host is closed.
        """
        future = self.submit(coroutine)
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError:
            if future.done() and not future.cancelled():
                # It came in at the last moment, or raised a TimeoutError of its own.
                return future.result()
            raise NetworkError(
                f"a network call took longer than {timeout:.3g} s and was given up."
            ) from None
        except concurrent.futures.CancelledError:
            raise NetworkError(
                "the network call was cancelled because the host is closing."
            ) from None
        finally:
            future.cancel()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine on the host's loop. Raises NetworkError if the host is closed."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError(
                "Host.call and Host.submit are not for the host's own thread: await the coroutine "
                "there"
            )
        if self._closed:
            coroutine.close()
            raise NetworkError("the host is closed.")
        running = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        # A loop refers weakly to its tasks: one that awaits a socket, and that nobody else holds,
        # would be collected with it.
        self._submitted.add(running)
        running.add_done_callback(self._submitted.discard)
        return running

    def serve(self, protocol: str, handler: Handler) -> None:
        """Answer incoming streams of ``protocol`` with ``handler``; an exception of it is logged
        and ends the stream.

        `ResourceManager` decides which are refused. When the handler returns, the stream stays open
        until the caller ends it (at most `LINGER_S` seconds), so that nothing sent is lost. Raises
        NetworkError if the daemon does not take the protocol within `SERVE_S` seconds; while the
        daemon restarts this returns at once, and the restart registers it.
        """

        async def incoming(
            way: str, origin: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            peer_id = self.puncher.owner(way) or way
            await self._answer(
                protocol, handler, Stream(peer_id, reader, writer, self.traffic, origin, way)
            )

        try:
            self.call(self._supervisor.serve(protocol, incoming), SERVE_S)
            self.call(self.puncher.serve(protocol, incoming), SERVE_S)
        except NetworkError:
            if not self._closed:
                raise NetworkError(
                    f"the network daemon did not take the protocol {protocol} within {SERVE_S:g} "
                    "s: the machine may be overloaded; try again."
                ) from None

    def remember(self, addresses: Iterable[str]) -> None:
        """Note addresses of peers by which to find the swarm again after the daemon has died."""
        self._supervisor.known.remember(addresses)

    def known(self) -> list[str]:
        """Return full multiaddrs of the peers heard of last, also of unreachable ones; newest
        first, 64 peers at most.
        """
        return self._supervisor.known.addresses()

    def entry(self) -> tuple[str, ...]:
        """Return the ids of the peers, bootstrap nodes apart, through which this node joined, at
        most 16.
        """
        return self._supervisor.bootstrapper.entry[:16]

    def seeds(self) -> dict[str, tuple[str, ...]]:
        """Return peer id -> addresses of the bootstrap peers that are bootstrap nodes
        (`shoal seed`).
        """
        return dict(self._supervisor.bootstrapper.seeds)

    def close(self, timeout: float = 5.0) -> None:
        """Leave the network and end the daemon within ``timeout`` seconds. May be called again."""
        if self._closed or self._owner != os.getpid():  # a forked copy owns nothing
            return
        self._closed = True
        atexit.unregister(self.close)
        with self._lock:  # it is released when the daemon, which uses the key, is gone
            self._end_thread(timeout)

    def _end_thread(self, timeout: float) -> None:
        if not self._thread.is_alive():
            self._loop.close()
            return
        ending = asyncio.run_coroutine_threadsafe(self._end(timeout * 0.6), self._loop)
        try:
            ending.result(timeout * 0.8)
        except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
            log.warning(
                "the network did not close within %.3g s; its daemon is ended by force", timeout
            )
        for daemon in (self._supervisor.daemon, self.puncher.daemon):
            if daemon is not None:  # the loop hangs: the guard takes it down
                daemon.end_by_force()
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout * 0.2)

    def _run_loop(self) -> None:
        """Run the loop until it is stopped, then cancel what is left on it."""
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.wait(left, timeout=1.0))
        self._loop.close()

    def __enter__(self) -> Host:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- on the loop -------------------------------------------------------------------------------

    async def open(
        self, peer_id: str, protocol: str, *, addresses: Sequence[str] = (), timeout: float
    ) -> Stream:
        """Open a stream to ``peer_id`` by ``addresses``, or by those that the daemon knows.

        Raises NetworkError.
        """
        daemon = self._supervisor.running()
        if self.resource_manager.access_policy.denies(peer_id):
            raise NetworkError(f"peer {short(peer_id)} is on this node's deny list.")
        if self.introduce is not None:
            await self.introduce(peer_id, protocol, addresses, timeout)

        try:
            opening = self._open(daemon, peer_id, protocol, addresses)
            return await self._supervisor.unless_down(opening, timeout)
        except DaemonError as error:
            if "protocols not supported" in str(error):
                raise NetworkError(
                    f"peer {short(peer_id)} does not offer {protocol}: it is not ready, or its "
                    "shoal is of another version.",
                    "refused",
                ) from None
            why = connections.why(error, addresses[0] if addresses else "")
            raise NetworkError(f"peer {short(peer_id)} {why}.", "unreachable") from None
        except TimeoutError:  # before its base OSError
            raise NetworkError(
                f"peer {short(peer_id)} did not open a stream within {timeout:.3g} s.",
                "unreachable",
            ) from None
        except (OSError, EOFError, ValueError) as error:
            raise NetworkError(
                f"cannot open a stream to peer {short(peer_id)} ({error}).", "unreachable"
            ) from None

    async def _open(
        self, daemon: Daemon, peer_id: str, protocol: str, addresses: Sequence[str]
    ) -> Stream:
        """Open a stream past the relay, or by ``addresses``, or by those that the daemon knows."""
        punched = await self.puncher.open(peer_id, protocol)
        if punched is not None:
            return punched
        refusal: DaemonError | None = None
        if addresses:
            # If these fail, the daemon may know better ones.
            try:
                await daemon.connect(peer_id, addresses)
            except PutOffError:
                raise
            except DaemonError as error:
                refusal = error
            except ValueError as error:
                log.debug("peer %s has no usable address: %s", short(peer_id), error)
        try:
            reader, writer = await daemon.open(peer_id, protocol)
        except DaemonError as error:
            raise refusal or error from None
        return Stream(peer_id, reader, writer, self.traffic)

    def usable(self, stream: Stream) -> bool:
        """Return whether an earlier stream of `open` is as good as a new one: open, to a peer not
        denied, by the way of choice.
        """
        peer = stream.peer_id
        denied = self.resource_manager.access_policy.denies(peer)
        return stream.idle and not denied and self.puncher.wanted(peer) == stream.is_punched

    @contextlib.asynccontextmanager
    async def _echo(self, way: str) -> AsyncIterator[Echo | None]:
        """Ping a daemon for the pacer, by libp2p's own protocol, which it answers; yield None if it
        is on this machine.
        """
        daemon = self.puncher.daemon if self.puncher.owner(way) else None
        if daemon is None:
            daemon = self._supervisor.running()
        if await daemon.is_local(way):
            yield None
            return
        # Bulk waits for it.
        reader, writer = await asyncio.wait_for(daemon.open(way, PING_PROTOCOL), ECHO_S)
        try:
            yield Echo(writer.write, lambda: reader.readexactly(PING_BYTES))
        finally:
            writer.close()

    async def connect(self, address: str, timeout: float) -> None:
        """Connect to the peer of a full multiaddr, unless connected.

        Raises NetworkError, whose text begins with the address.
        """
        daemon = self._supervisor.running()
        try:
            await self._supervisor.unless_down(
                daemon.connect(address.rpartition("/p2p/")[2], [address]), timeout
            )
        except TimeoutError:
            raise NetworkError(f"{address} did not answer within {timeout:.3g} s.") from None
        except (*DAEMON_GONE, ValueError) as error:
            raise NetworkError(f"{address} {connections.why(error, address)}.") from None

    async def locate(self, peers: Iterable[tuple[str, Sequence[str]]], timeout: float) -> None:
        """Connect to the peers, each with its addresses, that answer within ``timeout`` seconds,
        and note where they are (`met`).

        Raises NetworkError.
        """
        daemon = self._supervisor.running()
        try:
            async with running(
                *(daemon.connect(peer, addresses) for peer, addresses in peers if addresses)
            ) as dials:
                if dials:
                    await self._supervisor.unless_down(asyncio.wait(dials, timeout=timeout))
                await self._supervisor.unless_down(daemon.peers(), timeout)
        except (TimeoutError, *DAEMON_GONE) as error:
            raise NetworkError(f"the daemon was not asked for its peers ({error}).") from None

    async def find_seeds(self) -> None:
        """Try those bootstrap peers again that did not answer so far: they may be bootstrap nodes.

        Raises NetworkError.
        """
        await self._supervisor.bootstrapper.find_seeds()

    async def meet(self, addresses: Sequence[str]) -> None:
        """Connect to those of these peers that answer, and let the DHT know them.

        Raises NetworkError.
        """
        await self._supervisor.bootstrapper.meet(addresses)

    async def store(self, key: str, subkey: str, value: bytes, ttl: float) -> bool:
        """Put ``value`` (at most 64 KiB, else ValueError) into the DHT for ``ttl`` seconds; False
        if nobody took it.
        """
        if len(value) > MAX_VALUE_BYTES:
            raise ValueError(
                f"a DHT record of {len(value)} bytes: at most {MAX_VALUE_BYTES} are allowed"
            )
        dht = self._supervisor.running_dht()
        return bool(await self._dht_call(dht.store(key, value, time.time() + ttl, subkey=subkey)))

    async def get(self, key: str) -> dict[str, bytes]:
        """Return the live values under ``key``: subkey -> value.

        They passed the validator, if the host has one.
        """
        found = await self._dht_call(self._supervisor.running_dht().get(key, latest=True))
        if found is None or not isinstance(found.value, dict):
            return {}
        return {
            subkey: item.value
            for subkey, item in found.value.items()
            if isinstance(subkey, str)
            and isinstance(item.value, bytes)
            and len(item.value) <= MAX_VALUE_BYTES
        }

    async def _dht_call(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await self._supervisor.unless_down(work, DHT_S)
        except TimeoutError:
            raise NetworkError(f"the DHT did not answer within {DHT_S:g} s.") from None
        except DAEMON_GONE as error:
            raise NetworkError(f"the DHT could not be asked ({error}).") from None

    async def _answer(self, protocol: str, handler: Handler, stream: Stream) -> None:
        peer = stream.peer_id
        reason = "closed" if self._closed else self.resource_manager.acquire(stream, protocol)
        if reason:
            log.debug("refused a stream %s of peer %s: %s", protocol, short(peer), reason)
            stream.abort()
            if reason == "time" and not self.resource_manager.known(peer):
                await self._hang_up(stream.daemon_id)
            return
        try:
            await self.resource_manager.answer(stream, protocol, handler(stream))
            await stream.more(LINGER_S)
        except ShoalError as error:
            log.debug("%s with peer %s ended: %s", protocol, short(peer), error)
        except asyncio.CancelledError:
            stream.abort()
            raise
        except Exception as error:
            log.info("answering %s of peer %s failed: %r", protocol, short(peer), error)
            self.internal_errors.caught("stream", error)
        finally:
            stream.close()
            self.resource_manager.release(stream, protocol, stream.sent)

    async def _hang_up(self, peer_id: str) -> None:
        """End the connections to a peer: to refuse a stream costs half as much as to answer it."""
        if peer_id in self._hung_up:
            return
        self._hung_up.add(peer_id)
        try:
            await asyncio.wait_for(self._supervisor.running().disconnect(peer_id), HANG_UP_S)
        except (TimeoutError, NetworkError, *DAEMON_GONE) as error:
            log.debug("the connections of peer %s were not ended: %r", short(peer_id), error)
        finally:
            self._hung_up.discard(peer_id)

    async def _end(self, timeout: float) -> None:
        await asyncio.gather(self.puncher.end(), self._supervisor.end(timeout * 0.6))
        if others := [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]:
            for task in others:
                task.cancel()
            await asyncio.wait(others, timeout=timeout * 0.4)
