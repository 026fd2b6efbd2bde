"""The neighbours of a node in its swarm's gossip: who they are, and the streams to them.

    neighbours = Neighbours(host, swarm, take, members=directory_members, is_member=directory.knows)
    neighbours.join("status/2")
    neighbours.push("status/2", digest, envelope)

A node opens a stream to three members that it draws, and others open theirs to it; envelopes go
both ways. ``take`` checks what comes; only it calls `push`, so nothing is passed on before. What a
peer that is no member sends beyond its topics is not read. Why so: docs/internals.md, "Gossip".
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from blake3 import blake3

from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.gossip.envelope import BoundedQueue
from shoal.swarm.gossip.frames import (
    BEAT_S,
    MAX_TOPICS,
    GossipTopics,
    frame_of,
    greet,
    greeted,
    receive_frame,
    split_frame,
)
from shoal.swarm.p2p.addresses import by_turns, host_of, range_of
from shoal.swarm.p2p.counters import Counters
from shoal.swarm.p2p.messages import send_message
from shoal.swarm.p2p.newest import Newest
from shoal.swarm.p2p.rate_limit import RateLimit, TokenBuckets
from shoal.swarm.p2p.stream import Stream, short
from shoal.swarm.p2p.stream_places import StreamPlaces
from shoal.swarm.wire.envelope import fresh_nonce
from shoal.swarm.wire.messages import GOSSIP_PROTOCOL

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host

log = logging.getLogger(__name__)

DRAWN = 3
"""Members to which a node opens a stream: with those that open one to it some six are its
neighbours. A random graph in which each draws two is connected already."""
MAX_ACCEPTED = 12
"""Members that have opened one to it."""
MAX_READERS = 16
"""Peers that are no members, and only listen (`shoal watch`)."""
LOOK_S = 1.0
"""Between two looks at the members in view."""
OPEN_S = 10.0
SEND_S = 10.0
"""For a neighbour to take one message; one that does not is given up."""
RETRY_S = (1.0, 2.0, 5.0, 15.0, 60.0)
"""Before a member that was not reached is tried again; the last repeats."""
OUTBOX = (512, 8 << 20)
"""Messages and bytes that wait for one neighbour; of more the oldest are dropped."""
RECENT = (64, 1 << 20)
"""Messages and bytes that a new neighbour gets, if it is a member: those of the last `RECENT_S`
seconds."""
RECENT_S = 15.0
MAX_HAD = 4096
"""Messages of which is remembered that a neighbour has them."""
EACH = RateLimit(messages=12_000, nbytes=256 << 20)
"""That one neighbour may hand over in a minute; beyond it is read no faster."""
FAULTS = RateLimit(messages=16, period=600.0)
"""Of one neighbour until it is dropped, and not met again for `SHUNNED_S`. A fault is what any
honest neighbour would have refused too, whatever else it has seen."""
FAULT_PAUSE_S = 0.2
"""For which a neighbour is not read after each."""
FAULTS_OF_RANGE = RateLimit(messages=64, period=600.0)
"""The same of an address range: keys cost nothing."""
SHUNNED_S = 600.0
MAX_SHUNNED = 4096

Take = Callable[[str, str, bytes, bytes], Awaitable[bool]]
"""Gets topic, neighbour, digest and envelope; returns False if it is the neighbour's fault."""
Members = Callable[[], Mapping[str, tuple[str, ...]]]


class Envelope(NamedTuple):
    """An envelope of a topic, with the digest by which it is recognised."""

    topic: str
    digest: bytes
    data: bytes


class Neighbour:
    """A stream to a neighbour, which tells its ``topics``. ``is_drawn``: this node opened it."""

    def __init__(self, stream: Stream, topics: GossipTopics, *, is_drawn: bool) -> None:
        self.peer = stream.peer_id
        self.stream = stream
        self.topics = topics
        self.is_drawn = is_drawn
        self.outbox: BoundedQueue[Envelope | None] = BoundedQueue(*OUTBOX)
        """None: the topics of this node."""
        self.told: tuple[str, ...] = ()
        """The topics of this node that it was told last."""
        self.had = Newest[bytes, bool](MAX_HAD)
        """Digest -> whether the neighbour has sent it, or was sent it."""
        self.is_replaced = asyncio.Event()

    def offer(self, envelope: Envelope) -> int:
        """Queue an envelope, if the neighbour takes its topic and does not have it; return how many
        others that dropped.
        """
        if envelope.topic not in self.topics.topics or envelope.digest in self.had:
            return 0
        return len(self.outbox.put(envelope, len(envelope.data)))


class Neighbours:
    """The neighbours in the gossip of ``swarm``, until `close`.

    ``members``: the members in view that may be dialled, with their addresses. ``is_member``:
    whether a peer is one. ``unknown``: called when a peer comes that is none (yet).
    """

    def __init__(
        self,
        host: Host,
        swarm: str,
        take: Take,
        *,
        members: Members,
        is_member: Callable[[str], bool],
        unknown: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = Counters()
        self._host = host
        self._swarm = swarm
        self._take = take
        self._members = members
        self._is_member = is_member
        self._unknown = unknown
        self._clock = clock
        self._salt = fresh_nonce()
        self._topics: tuple[str, ...] = ()
        self._linked: dict[str, Neighbour] = {}
        self._dialling: dict[str, asyncio.Task[None]] = {}
        self._failed = Newest[str, tuple[int, float]](MAX_SHUNNED)
        """Peer -> failures in a row, and when it may be tried again."""
        self._shunned = Newest[str, float](MAX_SHUNNED)
        """Peer or address range -> until when."""
        self._recent: deque[tuple[float, Envelope]] = deque()
        self._recent_bytes = 0
        self._caught_up = Newest[str, float](MAX_SHUNNED)
        """Member -> when it got the recent ones."""
        self._accepted = StreamPlaces(MAX_ACCEPTED)
        self._readers = StreamPlaces(MAX_READERS)
        self._each = TokenBuckets(EACH, clock)
        self._faults = TokenBuckets(FAULTS, clock)
        self._faults_of_range = TokenBuckets(FAULTS_OF_RANGE, clock)
        host.serve(GOSSIP_PROTOCOL, self._answer)
        self._running = host.submit(self._run())

    def close(self) -> None:
        self._running.cancel()

    # -- on the loop -------------------------------------------------------------------------------

    def join(self, topic: str) -> None:
        """Send and take envelopes of ``topic`` from now on, one of at most `MAX_TOPICS`."""
        if topic not in self._topics:
            assert len(self._topics) < MAX_TOPICS
            self._topics = (*self._topics, topic)
            for neighbour in self._linked.values():
                neighbour.outbox.put(None, 0)

    def push(self, topic: str, digest: bytes, data: bytes, source: str = "") -> None:
        """Send an envelope that was checked to all neighbours but ``source`` and those that have
        it; never waits.
        """
        envelope = Envelope(topic, digest, data)
        self._keep_recent(envelope)
        for neighbour in self._linked.values():
            if neighbour.peer != source:
                self.counters.add("dropped", neighbour.offer(envelope))

    def listeners(self, topic: str) -> tuple[str, ...]:
        """Return the neighbours that take envelopes of ``topic``."""
        here = self._linked.items()
        return tuple(sorted(peer for peer, one in here if topic in one.topics.topics))

    def _keep_recent(self, envelope: Envelope) -> None:
        now = self._clock()
        self._recent.append((now, envelope))
        self._recent_bytes += len(envelope.data)
        while self._recent and (
            len(self._recent) > RECENT[0]
            or self._recent_bytes > RECENT[1]
            or self._recent[0][0] < now - RECENT_S
        ):
            _, old = self._recent.popleft()
            self._recent_bytes -= len(old.data)

    async def _run(self) -> None:
        try:
            while True:
                try:
                    self._draw()
                except Exception as error:  # a bug must not end the gossip
                    self._host.internal_errors.caught("gossip", error)
                await asyncio.sleep(LOOK_S)
        finally:
            for task in self._dialling.values():
                task.cancel()
            for neighbour in list(self._linked.values()):
                neighbour.stream.abort()

    def _draw(self) -> None:
        """Dial the members that come first, and leave those that do so no more."""
        now = self._clock()
        wanted: list[str] = []
        members = self._members()
        for peer in self._order(members):
            if len(wanted) == DRAWN:
                break
            if peer in self._linked:
                wanted.append(peer)
            elif self._failed.get(peer, (0, 0.0))[1] <= now:
                wanted.append(peer)
                if peer not in self._dialling:
                    dial = asyncio.ensure_future(self._dial(peer, members[peer]))
                    self._dialling[peer] = dial
                    dial.add_done_callback(functools.partial(self._dialled, peer))
        if all(peer in self._linked for peer in wanted):
            for neighbour in list(self._linked.values()):
                if neighbour.is_drawn and neighbour.peer not in wanted:
                    neighbour.stream.close()

    def _dialled(self, peer: str, _: object) -> None:
        self._dialling.pop(peer, None)

    def _order(self, members: Mapping[str, tuple[str, ...]]) -> list[str]:
        """Return the members in this node's own order, by a hash that nobody else can compute: one
        of each address range in turn; those that have only a relay last.
        """
        drawn: tuple[list[tuple[str, str]], list[tuple[str, str]]] = ([], [])
        for peer in sorted(members, key=self._hash):
            addresses = members[peer]
            place = self._host.met.get(peer) or host_of(addresses[0] if addresses else "")
            if addresses and not self._is_shunned(peer, place):
                is_relayed = all("/p2p-circuit" in address for address in addresses)
                drawn[is_relayed].append((peer, place))
        return [*by_turns(drawn[False]), *by_turns(drawn[True])]

    def _hash(self, peer: str) -> bytes:
        return hashlib.sha256(self._salt + peer.encode()).digest()

    async def _dial(self, peer: str, addresses: tuple[str, ...]) -> None:
        try:
            stream = await self._host.open(
                peer, GOSSIP_PROTOCOL, addresses=addresses, timeout=OPEN_S
            )
            try:
                theirs = await greet(stream, self._told())
                neighbour = Neighbour(stream, theirs, is_drawn=True)
                if self._link(neighbour):
                    self._failed.pop(peer, None)
                    await self._keep(neighbour)
            finally:
                stream.close()
        except (NetworkError, MessageError) as error:
            log.debug("peer %s is no neighbour: %s", short(peer), error)
            failures = min(self._failed.get(peer, (0, 0.0))[0], len(RETRY_S) - 1)
            self._failed[peer] = failures + 1, self._clock() + RETRY_S[failures]
        except Exception as error:
            self._host.internal_errors.caught("gossip", error)

    async def _answer(self, stream: Stream) -> None:
        theirs = await greeted(stream, self._swarm)
        is_member = self._is_member(stream.peer_id)
        places = self._accepted if is_member else self._readers
        before = self._linked.get(stream.peer_id)
        if before is not None:
            places.free(before.stream)  # one peer has one place
        if self._is_shunned(stream.peer_id, stream.origin) or not places.take(stream):
            self.counters.reject("crowded")
            return
        try:
            await send_message(stream, self._told(), SEND_S)
            neighbour = Neighbour(stream, theirs, is_drawn=False)
            if self._link(neighbour):
                await self._keep(neighbour)
        finally:
            places.free(stream)

    def _told(self) -> GossipTopics:
        return GossipTopics(swarm=self._swarm, topics=self._topics)

    def _link(self, neighbour: Neighbour) -> bool:
        """Make it a neighbour, in place of an earlier stream to the same peer; return False if that
        one stays: of two that were opened at once both ends keep that of the smaller id.
        """
        before = self._linked.get(neighbour.peer)
        if before is not None:
            opener = self._host.peer_id if before.is_drawn else before.peer
            if before.is_drawn != neighbour.is_drawn and opener == min(
                self._host.peer_id, neighbour.peer
            ):
                return False
            before.is_replaced.set()
        self._linked[neighbour.peer] = neighbour
        self._offer_recent(neighbour)
        return True

    def _offer_recent(self, neighbour: Neighbour) -> None:
        """Offer to a member what was pushed lately, since its last stream began: who opens one
        after the other gets it once.
        """
        if not neighbour.is_drawn and not self._is_member(neighbour.peer):
            return
        now = self._clock()
        oldest = max(now - RECENT_S, self._caught_up.get(neighbour.peer, now - RECENT_S))
        self._caught_up[neighbour.peer] = now
        for when, envelope in self._recent:
            if when >= oldest:
                neighbour.offer(envelope)

    async def _keep(self, neighbour: Neighbour) -> None:
        """Send and receive until one of both ends. Raises NetworkError or MessageError."""
        works = self._read(neighbour), self._write(neighbour), neighbour.is_replaced.wait()
        tasks = [asyncio.ensure_future(work) for work in works]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            if self._linked.get(neighbour.peer) is neighbour:
                del self._linked[neighbour.peer]
            neighbour.stream.abort()
            for task in tasks:
                task.cancel()
            # Of two that fail at once one is raised; else the other would count as a bug.
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _write(self, neighbour: Neighbour) -> None:
        while True:
            try:
                envelope = await asyncio.wait_for(neighbour.outbox.get(), BEAT_S)
            except TimeoutError:
                envelope = None
            if envelope is None or neighbour.told != self._topics:
                neighbour.told = self._topics
                await send_message(neighbour.stream, self._told(), SEND_S)
            if envelope is not None and envelope.digest not in neighbour.had:
                neighbour.had[envelope.digest] = False
                frame = frame_of(self._topics.index(envelope.topic), envelope.data)
                await neighbour.stream.send(frame, SEND_S)

    async def _read(self, neighbour: Neighbour) -> None:
        if not neighbour.is_drawn and not self._is_member(neighbour.peer):
            self._unknown()
            while not self._is_member(neighbour.peer):
                await asyncio.sleep(LOOK_S)
        while True:
            try:
                frame = await receive_frame(neighbour.stream)
                neighbour.topics, topic, data = split_frame(frame, neighbour.topics)
            except MessageError as error:
                self.counters.reject(error.reason)
                self._shun(neighbour)
                raise
            if topic:
                await self._receive(neighbour, topic, data)

    async def _receive(self, neighbour: Neighbour, topic: str, data: bytes) -> None:
        """Have an envelope checked. Raises NetworkError if there were too many faulty ones."""
        peer = neighbour.peer
        if not self._is_member(peer):
            raise NetworkError(f"peer {short(peer)} is no member any more.")
        while not self._each.take(peer, 1, len(data)):
            self.counters.add("slowed")
            await asyncio.sleep(LOOK_S)
        digest = blake3(data).digest()
        if neighbour.had.get(digest):
            self.counters.reject("replayed")
            is_sound = False
        else:
            neighbour.had[digest] = True
            is_sound = await self._take(topic, peer, digest, data)
        if not is_sound:
            self._blame(neighbour)
            await asyncio.sleep(FAULT_PAUSE_S)

    def _blame(self, neighbour: Neighbour) -> None:
        """Count a fault of the neighbour. Raises NetworkError if there were too many."""
        place = self._place_of(neighbour)
        is_in_budget = self._faults.take(neighbour.peer, 1, 0)
        if place and not self._faults_of_range.take(place, 1, 0):
            self._shunned[place] = self._clock() + SHUNNED_S
            is_in_budget = False
        if not is_in_budget:
            self._shun(neighbour)
            raise NetworkError(
                f"peer {short(neighbour.peer)} passed on what it should have refused."
            )

    def _place_of(self, neighbour: Neighbour) -> str:
        return range_of(neighbour.stream.origin or self._host.met.get(neighbour.peer, ""))

    def _shun(self, neighbour: Neighbour) -> None:
        """Have no stream with the neighbour for a while."""
        self.counters.add("shunned")
        self._shunned[neighbour.peer] = self._clock() + SHUNNED_S

    def _is_shunned(self, peer: str, host: str) -> bool:
        now = self._clock()
        return any(self._shunned.get(key, 0.0) > now for key in (peer, range_of(host)))
