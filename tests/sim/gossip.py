"""A swarm's gossip on a simulated network: the production code of `shoal.swarm.gossip`, with
members that lie, or pass nothing on.
"""

from __future__ import annotations

import asyncio
import functools
import random
import zlib
from collections import Counter
from typing import Any

from shoal.swarm.gossip.envelope import Body, Encoding, make_envelope
from shoal.swarm.gossip.frames import frame_of
from shoal.swarm.gossip.gossip import Gossip, Topic
from shoal.swarm.p2p.rate_limit import RateLimit
from shoal.swarm.wire.envelope import Count, Message, PeerId, SwarmId, seal
from tests.sim.clock import VirtualLoop
from tests.sim.network import Links, SimHost, SimNetwork, Trace

SWARM = "a" * 52
NAME_BYTES = 4


class Note(Message):
    """What the members of the simulation gossip."""

    KIND = "note"
    AUTHOR = "peer"
    swarm: SwarmId
    peer: PeerId
    number: Count


class GossipPeer:
    """A member, or with ``is_stranger`` a peer that dials them without being one."""

    def __init__(self, swarm: GossipSwarm, name: str, *, is_stranger: bool = False) -> None:
        self.swarm, self.name = swarm, name
        self.host: SimHost = swarm.network.host(name, swarm.network.identity(name))
        self.peer = self.host.peer_id
        self.got: Counter[tuple[str, int]] = Counter()
        self.published = 0
        swarm.peers[self.peer] = self
        if not is_stranger:
            swarm.members.add(self.peer)
        self.gossip: Gossip = self.host.process.context.run(self._gossip)
        self.topic: Topic[Note] = self.host.process.context.run(
            self.gossip.join, Note, self._take, swarm.quota
        )

    def _gossip(self) -> Gossip:
        return Gossip(
            self.host,  # type: ignore[arg-type]
            self.host.identity,
            SWARM,
            members=functools.partial(self.swarm.addresses, self.peer),
            is_member=self.swarm.members.__contains__,
            clock=self.swarm.loop.time,
        )

    def _take(self, author: str, note: Note) -> None:
        self.got[author, note.number] += 1

    @property
    def linked(self) -> dict[str, Any]:
        """Peer id -> the neighbour."""
        return self.gossip.neighbours._linked

    def rejected(self, reason: str) -> int:
        return self.gossip.refused().get(reason, 0)

    def note(self, number: int) -> Note:
        return Note(swarm=SWARM, peer=self.peer, number=number)

    def publish(self) -> tuple[str, int]:
        """Publish the next note; return what the others get."""
        self.published += 1
        self.host.process.context.run(self.topic.publish, self.note(self.published))
        return self.peer, self.published

    def send(self, *envelopes: bytes) -> None:
        """Send envelopes to all neighbours as they are."""

        async def sent() -> None:
            for neighbour in list(self.linked.values()):
                for envelope in envelopes:
                    await neighbour.stream.send(frame_of(0, envelope), 10.0)

        self.host.start(sent())

    def swallow(self) -> None:
        """Pass nothing on from now on, and keep sending what is this peer's own."""
        push = self.gossip.neighbours.push

        def own(topic: str, digest: bytes, data: bytes, source: str = "") -> None:
            if not source:
                push(topic, digest, data)

        self.gossip.neighbours.push = own  # type: ignore[method-assign]

    def envelope(
        self, number: int, *, author: GossipPeer | None = None, encoding: Encoding = "plain"
    ) -> bytes:
        """Return an envelope of a note of ``author`` that this peer has signed."""
        sealed = seal((author or self).note(number), self.host.identity)
        body = sealed if encoding == "plain" else zlib.compress(sealed)
        data = make_envelope(SWARM, Body(encoding, len(sealed), body))
        assert data is not None
        return data


class GossipSwarm:
    """Peers by id on one network. ``count`` members begin; ``views``: who of them sees whom, by
    numbers; None: all see all. ``quota``: of an author.
    """

    def __init__(
        self,
        seed: int,
        count: int,
        views: dict[int, set[int]] | None = None,
        quota: RateLimit | None = None,
    ) -> None:
        self.quota = quota
        self.loop = VirtualLoop()
        self.errors: list[str] = []
        """What the loop reports: tasks whose errors nobody took."""
        self.loop.set_exception_handler(lambda _, context: self.errors.append(str(context)))
        self.network = SimNetwork(self.loop, seed, Links(), Trace())
        self.chance = random.Random(f"gossip {seed}")
        self.peers: dict[str, GossipPeer] = {}
        self.members: set[str] = set()
        self.hidden: dict[str, set[str]] = {}
        """Peer -> the members that it sees no record of."""
        self.relayed: set[str] = set()
        """Members that are reached by a relay only."""
        self.all = [GossipPeer(self, f"peer {number}") for number in range(count)]
        for number, seen in (views or {}).items():
            peers = {self.all[other].peer for other in range(count) if other not in seen}
            self.hidden[self.all[number].peer] = peers

    def addresses(self, peer: str) -> dict[str, tuple[str, ...]]:
        """Return the members that ``peer`` may dial, each in an address range of its own."""
        found = {}
        for number, other in enumerate(sorted(self.members)):
            if other != peer and other not in self.hidden.get(peer, ()):
                at = f"/ip4/10.{number}.0.1/tcp/1"
                if other in self.relayed:
                    at += "/p2p/relay/p2p-circuit"
                found[other] = (f"{at}/p2p/{other}",)
        return found

    def run(self, seconds: float) -> None:
        async def pass_time() -> None:
            await asyncio.sleep(seconds)

        self.loop.run_until_complete(pass_time())

    def is_connected(self, peers: list[GossipPeer]) -> bool:
        """Return whether these peers, without the others, are one graph of neighbours."""
        there = {each.peer: each for each in peers}
        reached = {peers[0].peer}
        waiting = [peers[0].peer]
        while waiting:
            for other in there[waiting.pop()].linked:
                if other in there and other not in reached:
                    reached.add(other)
                    waiting.append(other)
        return len(reached) == len(peers)

    def end(self) -> None:
        for each in self.peers.values():
            each.gossip.close()
        self.network.end()
        self.loop.close()
