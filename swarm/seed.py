"""A bootstrap node (`shoal seed`): it trains nothing, names members of any swarm to each other, and
relays for unreachable ones.

It imports no torch, so it runs where 100 MB are free, and keeps all that it knows in memory,
bounded, for any peer may register. It forwards gossip between members that have only a relay in
common, and lists public swarms. Whom it believes, and how places are shared: docs/internals.md,
"A bootstrap node".
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from shoal.swarm.errors import MessageError, NetworkError, StartupError
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import Manifest, is_public, swarm_id, title_of
from shoal.swarm.p2p.addresses import by_turns, range_of
from shoal.swarm.p2p.daemon import ANSWER_S, DAEMON_GONE, Daemon, Incoming
from shoal.swarm.p2p.daemon_supervisor import started_again
from shoal.swarm.p2p.listening import beside, check_announced, check_free, fixed_ports, obtain_ports
from shoal.swarm.p2p.pubsub import Subscription
from shoal.swarm.p2p.punch import tell_seen
from shoal.swarm.p2p.rate_limit import RateLimit, TokenBuckets
from shoal.swarm.p2p.reachability import DIAL_PROTOCOL, ReachabilityProbe
from shoal.swarm.p2p.relay_slots import launch_relay
from shoal.swarm.p2p.stream import Stream, short
from shoal.swarm.p2p.stream_places import StreamPlaces
from shoal.swarm.pacing.meter import TrafficMeter
from shoal.swarm.wire.envelope import pack, peek, unpack, unseal
from shoal.swarm.wire.messages import (
    GONE,
    MAX_CONTACTS,
    MAX_LISTED,
    MAX_NAMED,
    SEED_PROTOCOL,
    SEEN_PROTOCOL,
    SWARMS_PROTOCOL,
    Announcement,
    ListedSwarm,
    Member,
    SeedReply,
    SeedRequest,
    SwarmsReply,
    SwarmsRequest,
)

log = logging.getLogger(__name__)

MAX_SWARMS = 128  # that are listed, and as many that are not
MAX_MEMBERS = 32  # of a swarm. With 5 KiB each, all of it is below 50 MB.
MAX_PLACES = 4  # swarms in which one peer is noted
TTL = 120.0  # seconds after which a silent member is forgotten


class _Place(NamedTuple):
    heard: float
    record: bytes
    host: str  # the IP address from which the record came
    range: str


def _most(ranges: Iterable[str]) -> str:
    return Counter(ranges).most_common(1)[0][0]


class SeedRegistry:
    """The members of swarms, and of the public ones what is announced; not for several threads.

    ``clock`` in seconds.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, chance: random.Random | None = None
    ) -> None:
        self._clock = clock
        self._chance = chance or random.Random()
        self._swarms: dict[
            str, OrderedDict[str, _Place]
        ] = {}  # swarm -> peer, the one heard of longest ago first
        self._places: Counter[str] = Counter()
        self._listed: dict[
            str, tuple[float, str, bytes]
        ] = {}  # swarm -> when heard, of whom, the sealed announcement

    def answer(self, peer: str, request: SeedRequest, host: str = "") -> SeedReply:
        """Reply to ``peer``, which called from the IP address ``host``, after noting its record if
        it brought one.
        """
        self._forget_silent()
        reason = (
            "" if request.record is None else self._note(peer, request.swarm, request.record, host)
        )
        return SeedReply(members=self._named(request.swarm, MAX_NAMED, but=peer), reason=reason)

    def _named(self, swarm: str, most: int, but: str = "") -> tuple[bytes, ...]:
        """Return the records of at most ``most`` members, drawn at random from each address range
        in turn.
        """
        members = self._swarms.get(swarm, OrderedDict())
        drawn = self._chance.sample(sorted(members.keys() - {but}), len(members.keys() - {but}))
        return tuple(
            members[peer].record
            for peer in by_turns((peer, members[peer].host) for peer in drawn)[:most]
        )

    def has(self, swarm: str, peer: str) -> bool:
        self._forget_silent()
        return peer in self._swarms.get(swarm, {})

    def _note(self, peer: str, swarm: str, record: bytes, host: str) -> str:
        """Note a record; return why not, if it is refused."""
        try:
            _, member = unseal(record, Member)
        except MessageError as error:
            log.debug("the record of peer %s was refused: %s", short(peer), error)
            return error.reason
        if member.peer != peer or member.swarm != swarm:
            return "forged"
        if member.state in GONE:
            self._forget(swarm, peer)
            return ""
        if peer not in self._swarms.get(
            swarm, {}
        ):  # who renews a record keeps the place, and its swarm that of a listed one
            if self._places[peer] >= MAX_PLACES:
                return "places"
            if swarm not in self._swarms and not self._has_room(host, listed=False):
                return "full"
            self._places[peer] += 1
        members = self._swarms.setdefault(swarm, OrderedDict())
        members[peer] = _Place(self._clock(), record, host, range_of(host))
        members.move_to_end(peer)
        if len(members) > MAX_MEMBERS:
            crowded = _most(place.range for place in members.values())
            self._forget(
                swarm, next(other for other, place in members.items() if place.range == crowded)
            )
        return ""

    def listing(self, peer: str, request: SwarmsRequest) -> SwarmsReply:
        """Reply to ``peer``, which asks for public swarms, after noting its announcement if it
        brought one.
        """
        self._forget_silent()
        reason = (
            "" if request.announcement is None else self._note_public(peer, request.announcement)
        )
        behind = [
            swarm
            for swarm in sorted(self._listed)
            if request.after is None or swarm > request.after
        ]
        swarms = tuple(self._packed(swarm) for swarm in behind[:MAX_LISTED])
        return SwarmsReply(swarms=swarms, more=len(behind) > MAX_LISTED, reason=reason)

    def _packed(self, swarm: str) -> bytes:
        announcement = self._listed[swarm][2]
        peers = len(self._swarms[swarm])
        return pack(
            ListedSwarm(
                announcement=announcement, peers=peers, contacts=self._named(swarm, MAX_CONTACTS)
            )
        )

    def _note_public(self, peer: str, sealed: bytes) -> str:
        """Note an announcement; return why not, if it is refused."""
        try:
            _, said = unseal(sealed, Announcement)
            if said.peer != peer or swarm_id(said.manifest) != said.swarm:
                return "forged"
            if not is_public(said.manifest):
                return "private"
            title_of(said.manifest)
        except MessageError as error:
            log.debug("the announcement of peer %s was refused: %s", short(peer), error)
            return error.reason
        place = self._swarms.get(said.swarm, OrderedDict()).get(peer)
        if place is None:
            return "unknown"  # the member's record comes first
        before = self._listed.get(said.swarm)
        if before is None and not self._has_room(place.host, listed=True):
            for member in list(self._swarms[said.swarm]):
                self._forget(said.swarm, member)
            return "full"
        if before is None or peer in (
            before[1],
            peek(said.manifest, Manifest.LIMIT).get("creator"),
        ):
            self._listed[said.swarm] = (self._clock(), peer, sealed)
        return ""

    def _has_room(self, host: str, *, listed: bool) -> bool:
        """Return whether a place is free, or make one: the range that has most gives one up, unless
        ``host``'s would have as many.

        Of its members' ranges a swarm counts for that with the fewest swarms: who joins it does not
        make it one of theirs. Of a range's swarms that goes whose newest member was heard of
        longest ago.
        """
        here = {
            swarm: members
            for swarm, members in self._swarms.items()
            if (swarm in self._listed) == listed
        }
        if len(here) < MAX_SWARMS:
            return True
        known = {
            swarm: {place.range for place in members.values()} for swarm, members in here.items()
        }
        common = Counter(one for ranges in known.values() for one in ranges)
        ranges = {swarm: min(sorted(of), key=common.__getitem__) for swarm, of in known.items()}
        crowded = _most(ranges.values())
        taken = Counter(ranges.values())
        if taken[crowded] <= taken[range_of(host)] + 1:
            return False
        theirs = [swarm for swarm in here if ranges[swarm] == crowded]
        gone = min(theirs, key=lambda swarm: next(reversed(here[swarm].values())).heard)
        for peer in list(here[gone]):
            self._forget(gone, peer)
        return True

    def _forget(self, swarm: str, peer: str) -> None:
        members = self._swarms.get(swarm, OrderedDict())
        if members.pop(peer, None) is None:
            return
        self._places[peer] -= 1
        if not self._places[peer]:
            del self._places[peer]
        if not members:
            del self._swarms[swarm]
            self._listed.pop(swarm, None)

    def _forget_silent(self) -> None:
        oldest = self._clock() - TTL
        for swarm, members in list(self._swarms.items()):
            for peer, place in list(members.items()):
                if place.heard >= oldest:
                    break  # members are in the order in which they were heard of
                self._forget(swarm, peer)
        self._listed = {swarm: said for swarm, said in self._listed.items() if said[0] >= oldest}


# that are forwarded at once, and asked for from one address range
MAX_TOPICS = 256
MAX_ASKED = 64
LOOK_S = 1.0  # seconds between two looks at what is asked for, and at who is connected
BUDGET = RateLimit(
    messages=3000, nbytes=16 << 20, senders=4 * MAX_TOPICS
)  # of one topic, in a minute
REST_S = 60.0  # seconds for which one is not forwarded that exceeded it


class GossipForwarding:
    """The topics that a bootstrap node forwards; use it on one loop. ``clock`` in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked: dict[str, dict[str, float]] = {}
        """Address range of the askers -> topic -> until when. The one asked for first is first."""
        self._rests: dict[str, float] = {}  # topic that exceeded its budget -> until when it rests
        self._budgets = TokenBuckets(BUDGET, clock)

    def ask(self, swarm: str, topics: Sequence[str], host: str) -> None:
        """Forward ``topics`` of ``swarm`` from now on, for a member that called from the IP address
        ``host``.
        """
        asked = self._asked.setdefault(range_of(host), {})
        for topic in (f"shoal/{swarm}/{topic}" for topic in topics):
            if topic in asked or len(asked) < MAX_ASKED:
                asked[topic] = self._clock() + TTL

    def chosen(self) -> list[str]:
        """Return the topics to forward: where too many are asked for, one of each address range in
        turn.
        """
        now = self._clock()
        live = {
            where: {topic: until for topic, until in asked.items() if until >= now}
            for where, asked in self._asked.items()
        }
        self._asked = {where: asked for where, asked in live.items() if asked}
        self._rests = {topic: until for topic, until in self._rests.items() if until >= now}
        turns = dict.fromkeys(
            topic
            for row in zip_longest(*self._asked.values())
            for topic in row
            if topic is not None
        )
        return [topic for topic in turns if topic not in self._rests][:MAX_TOPICS]

    def takes(self, topic: str, nbytes: int) -> bool:
        """Count a message of ``topic``; return False, and let it rest, if that is more than it may
        have.
        """
        if self._budgets.take(topic, 1, nbytes):
            return True
        log.warning(
            "%s is not forwarded for %g s: more is published than %d MiB a minute",
            topic,
            REST_S,
            BUDGET.nbytes >> 20,
        )
        self._rests[topic] = self._clock() + REST_S
        return False

    async def run(self, daemon: Daemon) -> None:
        """Subscribe ``daemon`` to what is chosen, until cancelled."""
        running: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                chosen = self.chosen()
                for topic in [
                    topic for topic, task in running.items() if task.done() or topic not in chosen
                ]:
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
        except (TimeoutError, *DAEMON_GONE) as error:
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
# answered at once
MAX_STREAMS = 192
MAX_STREAMS_PER_PEER = 4
LINGER = 2.0  # seconds an answered stream waits for the caller to end it
# connected peers of an address range, once there are three times as many in all; above 512 the
# daemon cuts down
MAX_OF_RANGE = 64
AT_ONCE = 32  # connections that are ended at a time


def crowding_peers(origins: Mapping[str, str]) -> list[str]:
    """Return the connected peers that have to go, by whence each came: of crowded address ranges,
    and there of crowded hosts.
    """
    if len(origins) <= 3 * MAX_OF_RANGE:
        return []
    of_range = Counter[str]()
    gone = []
    for peer in by_turns(origins.items(), place=str):
        where = range_of(origins[peer])
        of_range[where] += 1
        if of_range[where] > MAX_OF_RANGE:
            gone.append(peer)
    return gone


class Seed:
    """A bootstrap node; call `run`.

    ``on_ready`` gets the addresses under which it is reached, each time its daemon starts.
    """

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
        self.forwarding = GossipForwarding()
        self._identity = identity
        self._relay = relay
        self._on_ready = on_ready
        self._listen = tuple(listen)
        self._announce = tuple(announce)
        self._places = StreamPlaces(MAX_STREAMS)
        self._reachability = ReachabilityProbe()
        self._traffic = TrafficMeter()

    async def run(self) -> None:
        """Serve until cancelled; a daemon that ends is started again.

        Raises StartupError if it does not start the first time.
        """
        check_free(self._listen)
        check_announced(self._announce, self._identity.peer_id)
        if self._announce:
            self._listen = obtain_ports(self._listen)
        daemon = await self._launch()
        while True:
            try:
                status = await daemon.ended()
            finally:
                await daemon.shutdown()
            log.warning("the network daemon stopped (status %s); restarting it", status)
            daemon = await started_again(self._launch)

    async def _launch(self) -> Daemon:
        """Start a daemon that counts as reachable, and serve on it.

        Raises StartupError or NetworkError.
        """
        quic = beside(
            self._listen
        )  # for members that ask by what port their packets come; it is in no link
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
            await daemon.serve(DIAL_PROTOCOL, self._handler(self._reachability.answer))
            await daemon.serve(SEEN_PROTOCOL, self._handler(functools.partial(tell_seen, daemon)))
            found = await asyncio.wait_for(daemon.addresses(), ANSWER_S)
        except BaseException as error:
            await daemon.shutdown()
            if isinstance(error, (*DAEMON_GONE, ValueError, asyncio.TimeoutError)):
                raise StartupError(
                    f"the network daemon started but cannot be talked to ({error}): try again."
                ) from error
            raise
        daemon.at_end.append(asyncio.ensure_future(self._share(daemon)).cancel)
        if self._relay:
            daemon.at_end.append(asyncio.ensure_future(self.forwarding.run(daemon)).cancel)
        mute = "/p2p-circuit" if any("/quic-v1" in each for each in self._listen) else "/quic-v1"
        addresses = tuple(
            address for address in found if "/p2p-circuit" not in address and mute not in address
        )
        self._listen = fixed_ports(self._listen, addresses)
        self._on_ready(addresses)
        return daemon

    async def _share(self, daemon: Daemon) -> None:
        """Keep the daemon's connections from being taken by a few address ranges."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                gone = crowding_peers(await asyncio.wait_for(daemon.origins(), ANSWER_S))
                for at in range(
                    0, len(gone), AT_ONCE
                ):  # the end of one can take the daemon a tenth of a second
                    ends = (daemon.disconnect(peer) for peer in gone[at : at + AT_ONCE])
                    await asyncio.wait_for(asyncio.gather(*ends), ANSWER_S)
            except (TimeoutError, *DAEMON_GONE) as error:
                log.debug("connections were not shared out: %r", error)
                continue
            if gone:
                log.info("ended the connections of %d peers of crowded address ranges", len(gone))

    def _handler(self, answer: Callable[[Stream], Awaitable[None]]) -> Incoming:
        async def incoming(
            peer_id: str, origin: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            await self._limited(Stream(peer_id, reader, writer, self._traffic, origin), answer)

        return incoming

    async def _answer(self, stream: Stream) -> None:
        request = unpack(await stream.receive(SeedRequest.LIMIT, SMALL_S), SeedRequest)
        answer = self.registry.answer(stream.peer_id, request, stream.origin)
        if self._relay and self.registry.has(request.swarm, stream.peer_id):
            self.forwarding.ask(request.swarm, request.topics, stream.origin)
        await stream.send(pack(answer), SMALL_S)

    async def _list(self, stream: Stream) -> None:
        request = unpack(await stream.receive(SwarmsRequest.LIMIT, SMALL_S), SwarmsRequest)
        await stream.send(pack(self.registry.listing(stream.peer_id, request)), SMALL_S)

    async def _limited(self, stream: Stream, answer: Callable[[Stream], Awaitable[None]]) -> None:
        if self._places.peers[stream.peer_id] >= MAX_STREAMS_PER_PEER or not self._places.take(
            stream
        ):
            stream.abort()
            return
        try:
            await answer(stream)
            await stream.more(LINGER)
        except (MessageError, NetworkError) as error:
            log.debug("peer %s was not answered: %s", short(stream.peer_id), error)
        finally:
            self._places.free(stream)
