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
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from blake3 import blake3

from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.gossip.draw import Draw
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
from shoal.swarm.gossip.neighbour_faults import NeighbourFaults
from shoal.swarm.gossip.recent_envelopes import Envelope, RecentEnvelopes
from shoal.swarm.p2p.addresses import host_of
from shoal.swarm.p2p.counters import Counters
from shoal.swarm.p2p.messages import send_message
from shoal.swarm.p2p.newest import Newest
from shoal.swarm.p2p.stream import Stream, short
from shoal.swarm.p2p.stream_places import StreamPlaces
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
OUTBOX = (512, 8 << 20)
"""Messages and bytes that wait for one neighbour; of more the oldest are dropped."""
MAX_HAD = 4096
"""Messages of which is remembered that a neighbour has them."""
FAULT_PAUSE_S = 0.2
"""For which a neighbour is not read after a fault."""
Take = Callable[[str, str, bytes, bytes], Awaitable[bool]]
"""Gets topic, neighbour, digest and envelope; returns False if it is the neighbour's fault."""
Members = Callable[[], Mapping[str, tuple[str, ...]]]


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
        self._own = GossipTopics(swarm=swarm, topics=())
        self._take = take
        self._members = members
        self._is_member = is_member
        self._unknown = unknown
        self._linked: dict[str, Neighbour] = {}
        self._dialling: dict[str, asyncio.Task[None]] = {}
        self._draw = Draw(clock)
        self._recent = RecentEnvelopes(clock)
        self._faults = NeighbourFaults(clock)
        self._accepted = StreamPlaces(MAX_ACCEPTED)
        self._readers = StreamPlaces(MAX_READERS)
        host.serve(GOSSIP_PROTOCOL, self._answer)
        self._running = host.submit(self._run())

    def close(self) -> None:
        self._running.cancel()

    # -- on the loop -------------------------------------------------------------------------------

    def join(self, topic: str) -> None:
        """Send and take envelopes of ``topic`` from now on, one of at most `MAX_TOPICS`."""
        topics = self._own.topics
        if topic not in topics:
            assert len(topics) < MAX_TOPICS
            self._own = GossipTopics(swarm=self._own.swarm, topics=(*topics, topic))
            for neighbour in self._linked.values():
                neighbour.outbox.put(None, 0)

    def push(self, topic: str, digest: bytes, data: bytes, source: str = "") -> None:
        """Send an envelope that was checked to all neighbours but ``source`` and those that have
        it; never waits.
        """
        envelope = Envelope(topic, digest, data)
        self._recent.add(envelope)
        for neighbour in self._linked.values():
            if neighbour.peer != source:
                self.counters.add("dropped", neighbour.offer(envelope))

    def listeners(self, topic: str) -> tuple[str, ...]:
        """Return the neighbours that take envelopes of ``topic``."""
        here = self._linked.items()
        return tuple(sorted(peer for peer, one in here if topic in one.topics.topics))

    async def _run(self) -> None:
        try:
            while True:
                try:
                    self._dial_drawn()
                except Exception as error:  # a bug must not end the gossip
                    self._host.internal_errors.caught("gossip", error)
                await asyncio.sleep(LOOK_S)
        finally:
            for task in self._dialling.values():
                task.cancel()
            for neighbour in list(self._linked.values()):
                neighbour.stream.abort()

    def _dial_drawn(self) -> None:
        """Dial the members that come first, and leave those that do so no more."""
        wanted: list[str] = []
        members = self._members()
        origins: dict[str, str] = {}
        for peer, addresses in members.items():
            origin = self._host.met.get(peer) or host_of(addresses[0] if addresses else "")
            if addresses and not self._faults.is_shunned(peer, origin):
                origins[peer] = origin
        there = {peer: members[peer] for peer in origins}
        for peer in self._draw.order(there, origins):
            if len(wanted) == DRAWN:
                break
            if peer in self._linked:
                wanted.append(peer)
            elif self._draw.may_dial(peer):
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

    async def _dial(self, peer: str, addresses: tuple[str, ...]) -> None:
        try:
            stream = await self._host.open(
                peer, GOSSIP_PROTOCOL, addresses=addresses, timeout=OPEN_S
            )
            try:
                stream.is_gossip = True
                theirs = await greet(stream, self._own)
                neighbour = Neighbour(stream, theirs, is_drawn=True)
                if self._link(neighbour):
                    self._draw.reached(peer)
                    await self._keep(neighbour)
            finally:
                stream.close()
        except (NetworkError, MessageError) as error:
            log.debug("peer %s is no neighbour: %s", short(peer), error)
            self._draw.failed(peer)
        except Exception as error:
            self._host.internal_errors.caught("gossip", error)

    async def _answer(self, stream: Stream) -> None:
        stream.is_gossip = True
        theirs = await greeted(stream, self._own.swarm)
        is_member = self._is_member(stream.peer_id)
        places = self._accepted if is_member else self._readers
        # An earlier stream of the peer keeps its place until the new one replaces it.
        beyond = 1 if places.peers[stream.peer_id] else 0
        is_shunned = self._faults.is_shunned(stream.peer_id, stream.origin)
        if is_shunned or not places.take(stream, beyond):
            self.counters.reject("crowded")
            return
        try:
            await send_message(stream, self._own, SEND_S)
            neighbour = Neighbour(stream, theirs, is_drawn=False)
            if self._link(neighbour):
                await self._keep(neighbour)
        finally:
            places.free(stream)

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
        """Offer to a member what was pushed lately."""
        if not neighbour.is_drawn and not self._is_member(neighbour.peer):
            return
        for envelope in self._recent.since_last(neighbour.peer, is_drawn=neighbour.is_drawn):
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
            if envelope is None or neighbour.told != self._own.topics:
                neighbour.told = self._own.topics
                await send_message(neighbour.stream, self._own, SEND_S)
            if envelope is not None and envelope.digest not in neighbour.had:
                neighbour.had[envelope.digest] = False
                frame = frame_of(self._own.topics.index(envelope.topic), envelope.data)
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
                self.counters.add("shunned")
                self._faults.shun(neighbour.peer)
                raise
            if topic:
                await self._receive(neighbour, topic, data)

    async def _receive(self, neighbour: Neighbour, topic: str, data: bytes) -> None:
        """Have an envelope checked. Raises NetworkError if there were too many faulty ones."""
        peer = neighbour.peer
        if not self._is_member(peer):
            raise NetworkError(f"peer {short(peer)} is no member any more.")
        while not self._faults.may_hand_over(peer, len(data)):
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
        origin = neighbour.stream.origin or self._host.met.get(neighbour.peer, "")
        if not self._faults.blame(neighbour.peer, origin):
            self.counters.add("shunned")
            raise NetworkError(
                f"peer {short(neighbour.peer)} passed on what it should have refused."
            )
