"""A bootstrap node (`shoal seed`): it trains nothing, names members of any swarm to each other, and relays for unreachable ones.

It imports no torch, so it runs where 100 MB are free.

It forwards gossip between members that have only a relay in common: GossipSub in libp2p's daemon opens no stream over a relayed
connection, so of two nodes behind routers neither hears what the other publishes. But both are connected to the bootstrap node that
relays for them, and its daemon passes on what is published on a topic to which it is subscribed. So a member that announces a relay
names its topics, and the bootstrap node subscribes to them; it reads nothing of what comes but how much that is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from shoal.swarm.errors import MessageError, NetworkError, StartupError
from shoal.swarm.identity import Identity
from shoal.swarm.p2p.daemon import ANSWER_S, DAEMON_GONE, Daemon, Incoming
from shoal.swarm.p2p.listen import beside, check_announced, check_free, fixed_ports, obtain_ports
from shoal.swarm.p2p.multiaddr import range_of
from shoal.swarm.p2p.pubsub import Subscription
from shoal.swarm.p2p.punch import tell_seen
from shoal.swarm.p2p.rate_limit import RateLimit, TokenBuckets
from shoal.swarm.p2p.reachability import DIAL_PROTOCOL, ReachabilityProbe
from shoal.swarm.p2p.relay_slots import launch_relay
from shoal.swarm.p2p.stream import Stream, short
from shoal.swarm.p2p.stream_places import StreamPlaces
from shoal.swarm.pacing.meter import TrafficMeter
from shoal.swarm.seed.registry import AnnouncementBoard, SeedRegistry
from shoal.swarm.wire.envelope import pack, unpack
from shoal.swarm.wire.seed import SEED_PROTOCOL, SEEN_PROTOCOL, SWARMS_PROTOCOL, SeedRequest, SwarmsRequest

log = logging.getLogger(__name__)

MAX_TOPICS, MAX_ASKED = 256, 64  # that are forwarded at once, and asked for from one address range
TTL = 120.0  # seconds after which a topic that nobody asks for is not forwarded any more
LOOK_S = 1.0  # seconds between two looks at what is asked for, and at who is connected
BUDGET = RateLimit(messages=3000, nbytes=16 << 20, senders=4 * MAX_TOPICS)  # of one topic, in a minute
REST_S = 60.0  # seconds for which one is not forwarded that exceeded it


class GossipForwarding:
    """The topics that a bootstrap node forwards; use it on one loop. ``clock`` in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked: dict[str, dict[str, float]] = {}
        """Address range of the askers -> topic -> until when. The one asked for first is first."""
        self._rests: dict[str, float] = {}
        """Topic that exceeded its budget -> until when it rests."""
        self._budgets = TokenBuckets(BUDGET, clock)

    def ask(self, swarm: str, topics: Sequence[str], host: str) -> None:
        """Forward ``topics`` of ``swarm`` from now on, for a member that called from the IP address ``host``."""
        asked = self._asked.setdefault(range_of(host), {})
        for topic in (f"shoal/{swarm}/{topic}" for topic in topics):
            if topic in asked or len(asked) < MAX_ASKED:
                asked[topic] = self._clock() + TTL

    def chosen(self) -> list[str]:
        """Return the topics to forward: where too many are asked for, one of each address range in turn."""
        now = self._clock()
        live = {where: {topic: until for topic, until in asked.items() if until >= now} for where, asked in self._asked.items()}
        self._asked = {where: asked for where, asked in live.items() if asked}
        self._rests = {topic: until for topic, until in self._rests.items() if until >= now}
        turns = dict.fromkeys(topic for row in zip_longest(*self._asked.values()) for topic in row if topic is not None)
        return [topic for topic in turns if topic not in self._rests][:MAX_TOPICS]

    def takes(self, topic: str, nbytes: int) -> bool:
        """Count a message of ``topic``; return False, and let it rest, if that is more than it may have."""
        if self._budgets.take(topic, 1, nbytes):
            return True
        log.warning("%s is not forwarded for %g s: more is published than %d MiB a minute", topic, REST_S, BUDGET.nbytes >> 20)
        self._rests[topic] = self._clock() + REST_S
        return False

    async def run(self, daemon: Daemon) -> None:
        """Subscribe ``daemon`` to what is chosen, until cancelled."""
        running: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                chosen = self.chosen()
                for topic in [topic for topic, task in running.items() if task.done() or topic not in chosen]:
                    running.pop(topic).cancel()
                for topic in chosen:
                    if topic not in running:
                        running[topic] = asyncio.ensure_future(self._forward(daemon, topic))
        finally:
            for task in running.values():
                task.cancel()

    async def _forward(self, daemon: Daemon, topic: str) -> None:
        try:
            subscription = await asyncio.wait_for(Subscription.to(daemon, topic), ANSWER_S)
        except (*DAEMON_GONE, asyncio.TimeoutError) as error:
            log.debug("%s is not forwarded: %r", topic, error)
            return
        try:
            while self.takes(topic, len((await subscription.next()).data)):
                pass
        except NetworkError as error:
            log.debug("%s is forwarded no more: %s", topic, error)
        finally:
            subscription.close()


SMALL_S = 10.0  # seconds for one small message
MAX_STREAMS, MAX_STREAMS_PER_PEER = 192, 4  # answered at once
LINGER = 2.0  # seconds an answered stream waits for the caller to end it
MAX_OF_RANGE = 64  # connected peers of an address range, once there are three times as many in all; above 512 the daemon cuts down
AT_ONCE = 32  # connections that are ended at a time
BACKOFF = (0.1, 1.0, 5.0, 10.0)  # seconds before each further start of a daemon that ended; the last repeats


def beyond_share(origins: Mapping[str, str]) -> list[str]:
    """Return the connected peers that have to go, by whence each came: of crowded address ranges, and there of crowded hosts."""
    if len(origins) <= 3 * MAX_OF_RANGE:
        return []
    of_host, of_range = Counter[str](), Counter[str]()
    order = []
    for peer, host in origins.items():
        order.append((of_host[host], peer))
        of_host[host] += 1
    gone = []
    for _, peer in sorted(order, key=lambda each: each[0]):
        where = range_of(origins[peer])
        of_range[where] += 1
        if of_range[where] > MAX_OF_RANGE:
            gone.append(peer)
    return gone


class Seed:
    """A bootstrap node; call `run`. ``on_ready`` gets the addresses under which it is reached, each time its daemon starts."""

    def __init__(
        self,
        identity: Identity,
        *,
        listen: Sequence[str],
        announce: Sequence[str] = (),
        relay: bool = True,
        on_ready: Callable[[tuple[str, ...]], None] = lambda addresses: None,
    ) -> None:
        self.registry = SeedRegistry()
        self.board = AnnouncementBoard(self.registry)
        self.forwarding = GossipForwarding()
        self._identity = identity
        self._listen = tuple(listen)
        self._announce = tuple(announce)
        self._relay = relay
        self._on_ready = on_ready
        self._places = StreamPlaces(MAX_STREAMS)
        self._reachability = ReachabilityProbe()
        self._traffic = TrafficMeter()

    async def run(self) -> None:
        """Serve until cancelled; a daemon that ends is started again. Raises StartupError if it does not start the first time."""
        check_free(self._listen)
        check_announced(self._announce, self._identity.peer_id)
        if self._announce:
            self._listen = obtain_ports(self._listen)
        daemon: Daemon | None = await self._launch()
        attempt = 0
        while True:
            if daemon is not None:
                try:
                    status = await daemon.ended()
                finally:
                    await daemon.shutdown()
                log.warning("the network daemon stopped (status %s); restarting it", status)
                attempt = 0
            await asyncio.sleep(BACKOFF[min(attempt, len(BACKOFF) - 1)])
            attempt += 1
            try:
                daemon = await self._launch()
            except (StartupError, NetworkError) as error:
                daemon = None
                log.warning("the network daemon is not back yet, trying again: %s", error)

    async def _launch(self) -> Daemon:
        """Start a daemon that counts as reachable, and serve on it. Raises StartupError or NetworkError."""
        quic = beside(self._listen)  # for members that ask by what port their packets come; it is in no link
        daemon = await launch_relay(
            self._identity,
            listen=[*self._listen, *quic],
            announce=self._announce,
            relay="auto" if self._relay else "off",
            idle="",  # no connection to it stays open
        )
        try:
            await daemon.serve(SEED_PROTOCOL, self._handler(self._answer))
            await daemon.serve(SWARMS_PROTOCOL, self._handler(self._list))
            await daemon.serve(DIAL_PROTOCOL, self._handler(self._dial_back))
            await daemon.serve(SEEN_PROTOCOL, self._handler(lambda stream: self._limited(stream, tell_seen(daemon, stream))))
            found = await asyncio.wait_for(daemon.addresses(), ANSWER_S)
        except BaseException as error:
            await daemon.shutdown()
            if isinstance(error, (*DAEMON_GONE, ValueError, asyncio.TimeoutError)):
                raise StartupError(f"the network daemon started but cannot be talked to ({error}): try again.") from error
            raise
        daemon.at_end.append(asyncio.ensure_future(self._share(daemon)).cancel)
        if self._relay:
            daemon.at_end.append(asyncio.ensure_future(self.forwarding.run(daemon)).cancel)
        mute = "/p2p-circuit" if any("/quic-v1" in each for each in self._listen) else "/quic-v1"
        addresses = tuple(address for address in found if "/p2p-circuit" not in address and mute not in address)
        self._listen = fixed_ports(self._listen, addresses)
        self._on_ready(addresses)
        return daemon

    async def _share(self, daemon: Daemon) -> None:
        """Keep the daemon's connections from being taken by a few address ranges."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                gone = beyond_share(await asyncio.wait_for(daemon.origins(), ANSWER_S))
                for at in range(0, len(gone), AT_ONCE):  # the end of one can take the daemon a tenth of a second
                    ends = (daemon.disconnect(peer) for peer in gone[at : at + AT_ONCE])
                    await asyncio.wait_for(asyncio.gather(*ends), ANSWER_S)
            except (*DAEMON_GONE, asyncio.TimeoutError) as error:
                log.debug("connections were not shared out: %r", error)
                continue
            if gone:
                log.info("ended the connections of %d peers of crowded address ranges", len(gone))

    def _handler(self, answer: Callable[[Stream], Awaitable[None]]) -> Incoming:
        async def incoming(peer_id: str, origin: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await answer(Stream(peer_id, reader, writer, self._traffic, origin))

        return incoming

    async def _answer(self, stream: Stream) -> None:
        async def reply() -> None:
            request = unpack(await stream.receive(SeedRequest.LIMIT, SMALL_S), SeedRequest)
            answer = self.registry.answer(stream.peer_id, request, stream.origin)
            if self.registry.has(request.swarm, stream.peer_id):
                self.forwarding.ask(request.swarm, request.topics, stream.origin)
            await stream.send(pack(answer), SMALL_S)

        await self._limited(stream, reply())

    async def _list(self, stream: Stream) -> None:
        async def reply() -> None:
            request = unpack(await stream.receive(SwarmsRequest.LIMIT, SMALL_S), SwarmsRequest)
            await stream.send(pack(self.board.answer(stream.peer_id, request)), SMALL_S)

        await self._limited(stream, reply())

    async def _dial_back(self, stream: Stream) -> None:
        await self._limited(stream, self._reachability.answer(stream))

    async def _limited(self, stream: Stream, work: Coroutine[Any, Any, None]) -> None:
        if self._places.peers[stream.peer_id] >= MAX_STREAMS_PER_PEER or not self._places.take(stream):
            work.close()
            stream.abort()
            return
        try:
            await work
            await stream.more(LINGER)
        except (MessageError, NetworkError) as error:
            log.debug("peer %s was not answered: %s", short(stream.peer_id), error)
        finally:
            self._places.free(stream)
