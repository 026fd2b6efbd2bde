"""Membership on a simulated network: a `Directory` with its trie, bounds and rate, over a DHT that
is one table.

Real: the keys of records and of reads (`shoal.swarm.membership.trie`, `bucket_index`),
the number and rate of reads, the lifetime and size of records, and each peer's own view, seconds
old. Not simulated: the DHT itself, with its routing and replicas. A key is read, or a record
stored, in one round trip, and nothing of that is ever lost.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import NamedTuple, cast

from shoal.swarm.access.policy import AccessPolicy
from shoal.swarm.membership.bucket_index import Index
from shoal.swarm.membership.directory import PRESENT, TTL_S
from shoal.swarm.membership.directory_loops import HASTE_S, MIN_GAP_S, PERIOD_S
from shoal.swarm.membership.records import bits_of, make_record
from shoal.swarm.membership.room import MAX_IN_VIEW
from shoal.swarm.membership.trie import CAP, Names
from shoal.swarm.wire.messages import Member
from shoal.swarm.wire.record import LinkUse
from tests.sim.memory_stream import NOTHING
from tests.sim.network import SimHost, SimNetwork

EPOCH = 1.0e9  # Unix time at which a simulation begins


class Posted(NamedTuple):
    """A record in the table: ``until`` in virtual seconds."""

    member: Member
    nbytes: int
    until: float


class Board:
    """The table, shared by all peers."""

    def __init__(self, network: SimNetwork, swarm: str = "") -> None:
        self.network, self.swarm = network, swarm
        self._keys: dict[str, dict[str, Posted]] = {}
        self._due: dict[str, float] = {}
        """The time of the next expiry under each key."""
        self._asked: dict[float, list[tuple[asyncio.Future[Mapping[str, Posted]], str]]] = {}
        """Reads by the time of their answers: those asked at one time share a timer."""

    def put(self, prefix: str, posted: Posted) -> None:
        """Store a record under a key of the trie."""
        self._keys.setdefault(prefix, {})[posted.member.peer] = posted
        self._due[prefix] = min(self._due.get(prefix, posted.until), posted.until)

    def under(self, prefix: str) -> Mapping[str, Posted]:
        """Return the live records under a key."""
        names, now = self._keys.get(prefix, {}), self.network.loop.time()
        if names and now >= self._due[prefix]:
            names = self._keys[prefix] = {
                peer: posted for peer, posted in names.items() if posted.until > now
            }
            self._due[prefix] = min((posted.until for posted in names.values()), default=0.0)
        return names

    def read(self, prefix: str) -> asyncio.Future[Mapping[str, Posted]]:
        """Return the same, a round trip later."""
        loop, links = self.network.loop, self.network.links
        answer: asyncio.Future[Mapping[str, Posted]] = loop.create_future()
        when = loop.time() + 2 * (links.latency + links.jitter / 2)
        if when not in self._asked:
            self._asked[when] = []
            loop.call_at(when, self._answer, when, context=NOTHING)
        self._asked[when].append((answer, prefix))
        return answer

    def _answer(self, when: float) -> None:
        for answer, prefix in self._asked.pop(when):
            if not answer.done():
                answer.set_result(self.under(prefix))


class SimDirectory:
    """A peer's view and its own record: the part of a `Directory` that exchanges and
    `shoal.swarm.training.member.OuterSync` use.

    ``record``: returns the peer's current record. ``chance``: source of random numbers. ``limit``:
    about as many records are read. ``bucket``, ``epoch_s``: as in a manifest.
    """

    def __init__(
        self,
        board: Board,
        host: SimHost,
        record: Callable[[], Member],
        chance: random.Random,
        limit: int = MAX_IN_VIEW,
        bucket: int = 0,
        epoch_s: float = 60.0,
    ) -> None:
        self._board, self._host, self._record, self._chance = board, host, record, chance
        self._now = board.network.loop.time
        self.index = Index(
            board.swarm, host.peer_id, bucket=bucket, epoch_s=epoch_s, clock=self._unix,
            issued=lambda posted: float(posted.member.issued), limit=limit,
        )  # fmt: skip
        self._seen: dict[str, Member] = {}
        self._here: dict[str, Member] = {}
        self._left: dict[str, Member] = {}
        self._stale = 0.0
        """The time at which the two above have to be made anew."""
        self._keys: Mapping[str, Names] = {}
        self._prefix: str | None = None
        self._size: int | None = None
        self._pressing = self._curious = False
        self._wake = asyncio.Event()
        self.own_record = SimpleNamespace(link=LinkUse)
        self.access_policy = AccessPolicy(host.peer_id)
        self.nbytes = self.calls = 0
        """Bytes of records read and stored, and keys that were read or stored to."""

    # -- what others ask ---------------------------------------------------------------------------

    def members(self) -> dict[str, Member]:
        """Return peer id -> newest record of all that are waiting or training, this peer
        included.
        """
        if self._now() >= self._stale:
            self._sort()
        return self._here

    def everyone(self) -> dict[str, Member]:
        """Return the same, with those of the buckets that this peer was in just now."""
        return {peer: member for peer, member in self._seen.items() if member.state in PRESENT}

    def departed(self) -> dict[str, Member]:
        """Return peer id -> last record of all that recently announced that they left or are
        done.
        """
        self.members()
        return self._left

    def belongs(self, peer: str) -> bool:
        """Return whether this peer would see another if that were a member."""
        return self.index.shows(peer)

    def is_barred(self, peer: str) -> bool:
        return False

    def look(self) -> None:
        """Read soon, because an unknown peer turned up."""
        self._curious = True
        self._wake.set()

    def announce(self) -> None:
        """Publish soon: the round or the state has changed."""
        self._pressing = True
        self._note(self._record())
        self._wake.set()

    # -- what it does ------------------------------------------------------------------------------

    def settle(self, size: int = 1) -> None:
        """Enter the table at the start, as if this peer had come after all that are in it already,
        to a swarm of ``size``.
        """
        self.index.begin(size)
        keys: dict[str, Names] = {}
        bits, depth = bits_of(self._host.peer_id), 0
        while bits[:depth] not in keys:
            keys[bits[:depth]] = self._board.under(bits[:depth])
            depth += len(keys[bits[:depth]]) >= CAP
        for prefix in self.index.places(None, keys):
            self._board.put(prefix, self._posted(prefix))

    async def run(self) -> None:
        """Publish and read until the end, at a `Directory`'s rate."""
        read = published = float("-inf")
        while True:
            self._wake.clear()
            now, due = self._now(), PERIOD_S * 0.75
            if now - read >= (MIN_GAP_S if self._curious else due) or self._prefix is None:
                read, self._curious = now, False
                await self.read()
            if self._pressing or now - published >= due:
                published, self._pressing = now, False
                for prefix in self.index.places(self._prefix, self._keys, self._chance.random()):
                    self._store(prefix)
            try:
                await asyncio.wait_for(
                    self._wake.wait(),
                    HASTE_S if self._curious else PERIOD_S * self._chance.uniform(0.8, 1.0),
                )
            except TimeoutError:
                continue
            if self._pressing and (since := self._now() - published) < MIN_GAP_S:
                await asyncio.sleep(MIN_GAP_S - since)

    async def read(self) -> None:
        """Read the trie, or as much of it as a node reads."""
        keys = await self.index.read(self._board.read, now=self._prefix)
        self._keys = keys
        self._curious, self._pressing = (
            self._curious or self.index.moved,
            self._pressing or self.index.moved,
        )
        self.calls += len(keys)
        read: dict[str, Posted] = {}
        for names in cast(dict[str, Mapping[str, Posted]], keys).values():
            if read.keys().isdisjoint(names):
                read.update(names)
            else:  # a record that moved stands in two places until the older one expires
                read.update(
                    {
                        p: new
                        for p, new in names.items()
                        if p not in read or read[p].until < new.until
                    }
                )
            self.nbytes += sum(posted.nbytes for posted in names.values())
        mine = self._seen.get(self._host.peer_id)
        self._seen.update({peer: posted.member for peer, posted in read.items()})
        if mine is not None:
            self._seen[mine.peer] = mine
        self._sort()

    def _unix(self) -> float:
        return EPOCH + self._now()

    def _note(self, mine: Member) -> None:
        self._seen[mine.peer] = mine  # always in its own bucket
        self._here.pop(mine.peer, None)
        self._left.pop(mine.peer, None)
        (self._here if mine.state in PRESENT else self._left)[mine.peer] = mine

    def _sort(self) -> None:
        oldest = self._unix() - TTL_S
        self._seen = live = {
            peer: member for peer, member in self._seen.items() if member.issued >= oldest
        }
        shown = (
            {peer: member for peer, member in live.items() if self.index.shows(peer)}
            if self.index.depth
            else live
        )
        self._left = {peer: member for peer, member in shown.items() if member.state not in PRESENT}
        self._here = (
            {peer: member for peer, member in shown.items() if peer not in self._left}
            if self._left
            else dict(shown)
        )
        first = min([member.issued for member in live.values()], default=math.inf)
        self._stale = min(first + TTL_S + 1e-6, self.index.changes()) - EPOCH

    def _store(self, prefix: str) -> None:
        posted, links = self._posted(prefix), self._board.network.links
        self._board.network.loop.call_later(
            links.latency + links.jitter / 2, self._board.put, prefix, posted,
            context=NOTHING,  # the record has left, even if its peer dies
        )  # fmt: skip

    def _posted(self, prefix: str) -> Posted:
        mine = self._record()
        self._note(mine)
        if self._size is None:  # signing each record would show no more
            self._size = len(make_record(prefix, mine, self._host.identity))
        self._prefix = prefix
        self.nbytes += self._size
        self.calls += 1
        return Posted(mine, self._size, self._now() + TTL_S)
