"""An internet in one process: hosts on a virtual clock, streams with latency and bandwidth, and
faults; all from one seed.

`SimHost` is the part of `shoal.swarm.p2p.host.Host` that exchanges use. The protocols above it, and
the streams, are the production code.

The effects of faults on the other hosts:

    kill        its callbacks are never called again; the others' streams to it end, and no new ones
                can be opened
    sleep       its callbacks wait until it wakes (SIGSTOP); its daemon goes on taking streams and
                bytes, as the real one does
    partition   bytes wait at the border until it is lifted; streams across it cannot be opened
    sever       one stream breaks, with an end of file or with a reset
    stall       one stream carries nothing any more, unannounced, as when a router forgets a
                connection
    slow        every link of a host gets so many seconds longer, for a while
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shoal.optim.exchange.base import Mean
from shoal.swarm.errors import NetworkError, ShoalError
from shoal.swarm.exchange.exchange_base import ExchangeHandle
from shoal.swarm.identity import Identity
from shoal.swarm.internal_errors import InternalErrors
from shoal.swarm.p2p.resource_manager import ResourceManager
from shoal.swarm.p2p.stream import Stream, short
from shoal.swarm.pacing.meter import TrafficMeter
from shoal.swarm.wire.envelope import NONCES
from tests.sim.clock import Process, Stuck, VirtualLoop
from tests.sim.memory_stream import NOTHING, MemoryLink, MemoryTransport, streams_of

T = TypeVar("T")
LINGER = 2.0  # seconds that an answered stream waits for the caller to end it, as at a real host


@dataclass(frozen=True)
class Links:
    """The properties of every link.

    ``latency``, ``jitter``: seconds one way; ``bandwidth``: bytes per second of one stream.

    ``shared``: that bandwidth is of all that a host sends.
    """

    latency: float = 0.02
    jitter: float = 0.01
    bandwidth: float = 4e6
    shared: bool = False


class Trace:
    """The events in order: a hash of them, and with ``keep`` the lines themselves."""

    def __init__(self, keep: bool = False) -> None:
        self._hash = hashlib.sha256()
        self.lines: list[str] | None = [] if keep else None
        self.events = 0

    def note(self, time: float, peer: str, event: str) -> None:
        line = f"{time:.9f} {peer} {event}"
        self._hash.update(line.encode() + b"\n")
        self.events += 1
        if self.lines is not None:
            self.lines.append(line)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


class SimNetwork:
    """All hosts and the links between them.

    ``watch``: called with a peer's name after every event of it.
    """

    def __init__(self, loop: VirtualLoop, seed: int, links: Links, trace: Trace) -> None:
        self.loop, self.links, self.trace = loop, links, trace
        self.watch: Callable[[str], None] = lambda name: None
        self.seed, self.errors = seed, list[BaseException]()
        """Errors raised by handlers that are no error of their peers."""
        self.chance = random.Random(f"network {seed}")
        self.stream = Stream
        """The class of a host's streams."""
        self.hosts: dict[str, SimHost] = {}
        self.every: list[SimHost] = []
        """All processes that ever were."""
        self.wires: dict[int, Wire] = {}
        """Streams that have not ended, by number."""
        self._number = 0
        self._sides: dict[str, int] = {}
        """Peer id -> side of the partition; empty: there is none."""

    def identity(self, name: str) -> Identity:
        """Return the key of that name, always the same."""
        return Identity(
            Ed25519PrivateKey.from_private_bytes(
                hashlib.sha256(f"shoal sim {name}".encode()).digest()
            )
        )

    def note(self, name: str, event: str) -> None:
        self.trace.note(self.loop.time(), name, event)
        self.watch(name)

    def host(self, name: str, identity: Identity) -> SimHost:
        """Make a new process; an earlier one of the same peer must be dead."""
        host = SimHost(self, name, identity)
        self.hosts[host.peer_id] = host
        self.every.append(host)
        return host

    def born(self) -> int:
        """Return a number that no other process has."""
        self._number += 1
        return self._number

    def latency(self, one: SimHost, two: SimHost) -> float:
        return self.links.latency + self.links.jitter * self.chance.random() + one.slow + two.slow

    def apart(self, one: str, two: str) -> bool:
        return bool(self._sides) and self._sides.get(one) != self._sides.get(two)

    def wire(self, one: SimHost, two: SimHost) -> tuple[MemoryTransport, MemoryTransport]:
        number = self.born()
        self.note(one.name, f"opens {number} to {two.name}")
        wire = self.wires[number] = Wire(self, number, one, two)
        return wire.ends

    def datagram(
        self,
        one: SimHost,
        two: SimHost,
        deliver: Callable[[], None],
        lose: float = 0.0,
        again: float = 0.0,
    ) -> None:
        """Call ``deliver`` in the other's process after a while; never with the chance ``lose``,
        twice with ``again``.
        """
        for _ in range(2 if self.chance.random() < again else 1):
            if self.chance.random() >= lose and not self.apart(one.peer_id, two.peer_id):
                late = (
                    100 * self.links.jitter * self.chance.random() ** 4
                )  # so that some overtake others
                self.loop.call_later(
                    self.latency(one, two) + late, deliver, context=two.process.context
                )

    # -- faults ------------------------------------------------------------------------------------

    def kill(self, peer: str) -> None:
        """Kill a process, like ``kill -9``."""
        host = self.hosts[peer]
        self.note(host.name, "killed")
        host.process.state = "dead"
        for wire in list(self.wires.values()):
            wire.end_of(host)

    def sleep(self, peer: str) -> None:
        """Stop a process, like SIGSTOP, until ``wake``."""
        host = self.hosts[peer]
        if host.process.state == "awake":
            self.note(host.name, "fell asleep")
            host.process.state = "asleep"

    def wake(self, peer: str) -> None:
        """Continue a process, like SIGCONT."""
        host = self.hosts[peer]
        if host.process.state == "asleep":
            self.note(host.name, "woke")
            self.loop.wake(host.process)

    def part(self, sides: dict[str, int]) -> None:
        """Separate peers with different numbers; with {} end the partition."""
        self.note("-", "parted" if sides else "healed")
        self._sides = sides
        for wire in list(self.wires.values()):
            wire.release()

    def sever(self, number: int, reset: bool) -> None:
        """Break the stream of this number, if there is one."""
        wire = self.wires.get(number)
        if wire is not None:
            self.note("-", f"severed {number}")
            for end in wire.ends:
                end.sever(ConnectionResetError("reset") if reset else None)

    def stall(self, number: int) -> None:
        """Let the stream of this number carry nothing any more, if there is one."""
        wire = self.wires.get(number)
        if wire is not None:
            self.note("-", f"stalled {number}")
            wire.stalled = True

    def keep_alive(self) -> None:
        """End the streams that carry nothing any more, as the daemons' keep-alive does in half a
        minute.
        """
        for number, wire in list(self.wires.items()):
            if wire.stalled:
                self.sever(number, reset=True)
                del self.wires[number]

    def end(self) -> None:
        """End all processes, also killed ones: cancel their tasks, and run them to that end."""
        for wire in list(self.wires.values()):
            for end in wire.ends:
                end.vanish()
        for _ in range(100):
            tasks = [task for host in self.every for task in list(host.process.tasks.values())]
            if not tasks:
                return
            for task in tasks:
                task.cancel()
            for host in self.every:
                self.loop.wake(host.process)
            with contextlib.suppress(Stuck):
                self.loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))
        raise Stuck(f"tasks do not end: {tasks}")


class Wire:
    """One stream, as the network sees it."""

    def __init__(self, network: SimNetwork, number: int, one: SimHost, two: SimHost) -> None:
        self.network, self.number, self.hosts = network, number, (one, two)
        self.links = (_Delayed(self, one, two), _Delayed(self, two, one))
        loop = network.loop
        self.ends = (
            MemoryTransport(loop, self.links[0], one.process.context),
            MemoryTransport(loop, self.links[1], two.process.context),
        )
        self.ends[0].other, self.ends[1].other = self.ends[1], self.ends[0]
        self.ended, self.stalled = 0, False

    def end_of(self, host: SimHost) -> None:
        """Vanish from the network: the host is dead."""
        for end, owner in zip(self.ends, self.hosts, strict=True):
            if owner is host:
                end.vanish()

    def release(self) -> None:
        """Deliver waiting bytes that may pass now."""
        for link in self.links:
            link.release()

    def over(self) -> None:
        """Count an end of file that arrived; after both the stream is removed."""
        self.ended += 1
        if self.ended == 2:
            self.network.wires.pop(self.number, None)


class _Delayed(MemoryLink):
    """A link whose bytes take its latency, one after the other at its bandwidth, and wait at the
    border of a partition.
    """

    def __init__(self, wire: Wire, source: SimHost, target: SimHost) -> None:
        super().__init__(wire.network.loop)
        self._wire, self._source, self._target = wire, source, target
        self.free = self._last = 0.0
        self._moving: deque[tuple[int, Callable[[], None]]] = deque()
        self._arrived = 0
        """The number of those, from the first, that wait at the border."""

    def carry(self, nbytes: int, deliver: Callable[[], None]) -> None:
        """Deliver later, in the order of the calls."""
        network, now = self._wire.network, self._loop.time()
        link: _Delayed | SimHost = self._source if network.links.shared else self
        link.free = max(link.free, now) + nbytes / network.links.bandwidth
        self._last = max(self._last, link.free + network.latency(self._source, self._target))
        self._moving.append((nbytes, deliver))
        self._loop.call_at(
            self._last, self._arrive, context=NOTHING
        )  # of two at one time the loop may call either first

    def _arrive(self) -> None:
        self._arrived += 1
        self.release()

    def release(self) -> None:
        """Deliver what has arrived, unless a partition separates the two."""
        wire = self._wire
        while (
            self._arrived
            and not wire.stalled
            and not wire.network.apart(self._source.peer_id, self._target.peer_id)
        ):
            self._arrived -= 1
            nbytes, deliver = self._moving.popleft()
            wire.network.note(
                self._target.name, f"got {nbytes} on {wire.number} from {self._source.name}"
            )
            deliver()
            if not nbytes:
                wire.over()


class SimHost:
    """The part of a `shoal.swarm.p2p.host.Host` that exchanges use, in a process of its own on a
    `SimNetwork`.
    """

    def __init__(self, network: SimNetwork, name: str, identity: Identity) -> None:
        self.network, self.name, self.identity, self.peer_id = (
            network,
            name,
            identity,
            identity.peer_id,
        )
        self.process = Process(name)
        self.process.context.run(
            NONCES.set, random.Random(f"nonces {network.seed} {name} {network.born()}").randbytes
        )
        self.traffic = TrafficMeter()
        self.internal_errors = InternalErrors(network.loop.time)
        self.restarts = 0
        self.resource_manager = ResourceManager(clock=network.loop.time)
        """Refuses no peer: it only counts."""
        self.free = 0.0
        """The time at which everything sent has left, where its streams share one link."""
        self.met: dict[str, str] = {}
        self.slow = 0.0
        """Seconds that its links take longer, each way."""
        self.busy: Counter[str] = Counter()
        self._handlers: dict[str, Callable[[Stream], Awaitable[None]]] = {}

    @property
    def alive(self) -> bool:
        return True

    def entry(self) -> tuple[str, ...]:
        return ()

    def seeds(self) -> dict[str, tuple[str, ...]]:
        return {}

    def serve(self, protocol: str, handler: Callable[[Stream], Awaitable[None]]) -> None:
        """Serve a protocol, like ``Host.serve``."""
        self._handlers[protocol] = handler

    def start(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task of this host's process."""
        return self.process.context.copy().run(self.network.loop.create_task, coroutine)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine, like ``Host.submit``; do not block on the result, because the caller is
        on the loop too.
        """
        return self.process.context.copy().run(
            asyncio.run_coroutine_threadsafe, coroutine, self.network.loop
        )

    def call(self, coroutine: Coroutine[Any, Any, T], timeout: float) -> T:
        """Run a coroutine that need not wait, like ``Host.call``: the caller is on the loop too.

        Raises RuntimeError if it would
        wait.
        """
        try:
            self.process.context.copy().run(coroutine.send, None)
        except StopIteration as end:
            result: T = end.value
            return result
        coroutine.close()
        raise RuntimeError("a simulated host's call would have to wait")

    async def open(
        self, peer_id: str, protocol: str, *, addresses: Sequence[str] = (), timeout: float
    ) -> Stream:
        """Open a stream, like ``Host.open``. Raises NetworkError."""
        try:
            return await asyncio.wait_for(self._dial(peer_id, protocol), timeout)
        except TimeoutError:
            raise NetworkError(
                f"peer {short(peer_id)} did not open a stream within {timeout:.3g} s.",
                "unreachable",
            ) from None

    async def _dial(self, peer_id: str, protocol: str) -> Stream:
        network = self.network
        other = network.hosts.get(peer_id)
        network.note(
            self.name, f"calls {other.name if other is not None else 'nobody'} for {protocol}"
        )
        if other is None:
            raise NetworkError("there is no such peer.")
        await asyncio.sleep(network.latency(self, other))
        while network.apart(self.peer_id, peer_id):
            await asyncio.sleep(1.0)  # a packet is sent again and again
        await asyncio.sleep(network.latency(other, self))
        other = network.hosts[peer_id]  # it may be another process by now
        handler = other._handlers.get(protocol)
        if other.process.state == "dead" or handler is None:
            raise NetworkError("nobody is there.")
        mine, theirs = network.wire(self, other)
        stream = network.stream(peer_id, *streams_of(mine, network.loop), self.traffic)
        other.process.context.copy().run(other._incoming, self.peer_id, theirs, handler)
        return stream

    def usable(self, stream: Stream) -> bool:
        return stream.idle

    def _incoming(
        self, peer_id: str, end: MemoryTransport, handler: Callable[[Stream], Awaitable[None]]
    ) -> None:
        stream = self.network.stream(peer_id, *streams_of(end, self.network.loop), self.traffic)
        self.network.loop.create_task(self._answer(handler, stream))

    async def _answer(self, handler: Callable[[Stream], Awaitable[None]], stream: Stream) -> None:
        self.busy[stream.peer_id] += 1
        try:
            with contextlib.suppress(ShoalError):
                await handler(stream)
                await stream.more(LINGER)
        except Exception as error:
            self.network.errors.append(error)
        finally:
            stream.close()
            self.busy[stream.peer_id] -= 1
            if not self.busy[stream.peer_id]:
                del self.busy[stream.peer_id]


async def settled(handle: ExchangeHandle[Any]) -> Mean | None:
    """Do the same as ``handle.result()`` in a coroutine on the host's loop, by the loop's clock."""
    work = asyncio.wrap_future(handle._future)
    if not work.done():
        handle._attempt.commit.await_outcome()
    await asyncio.wait({work}, timeout=handle.limit)
    if not work.done():
        handle.close()
        await asyncio.wait({work})
    if not work.cancelled():
        work.result()
    return handle._mean_of(handle._attempt.outcomes())
