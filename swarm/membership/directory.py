"""The directory of a swarm: every node publishes a signed, expiring record of itself in the DHT,
and reads the others'.

Only `Directory.refresh`, `wait_for` and `leave` wait for the network. Records are published and
read in the background on the host's loop, and `members` is the newest view.
`shoal.swarm.membership.dht` explains why no key grows with the swarm.

**Room**: the members that a node keeps in view when the directory has more records than there is
room for.

A key costs nothing, so a stranger can write any number of records. As long as all fit, all are in
view, and all nodes see the same. Beyond that the places go to

1. the members that were met, because they called or answered; an address that nobody was met at
   proves nothing;
2. the others, those in view for longest first;
3. and an eighth of the places to newcomers, drawn anew from time to time, so that each is seen
   once, whatever came before it.

In each part one member of each address range comes before the second of any: the /16 of IPv4, the
/32 of IPv6. Private ranges and loopback count as ranges too: a team in one of them is met, and so
in the first part.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import heapq
import logging
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from shoal.swarm.access import AccessPolicy
from shoal.swarm.errors import NetworkError, Repeats
from shoal.swarm.identity import Identity
from shoal.swarm.membership import dht
from shoal.swarm.membership.dht import (
    MAX_TTL,
    Index,
    VerifiedRecord,
    bits_of,
    key_of,
    make_record,
    open_record,
)
from shoal.swarm.p2p.addresses import host_of, known_first
from shoal.swarm.p2p.stream import short
from shoal.swarm.wire.envelope import Reach, rate
from shoal.swarm.wire.messages import Member

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host


# members in view: 5 MB for as many of the largest records, which are read every few seconds
ROOM = 1024
NEWCOMERS = 8  # one place in so many is for them


class Room:
    """The choice of at most ``most`` members.

    ``met``: where each peer was met, an IP address or a word.
    """

    def __init__(self, met: Mapping[str, str], most: int = ROOM, salt: bytes | None = None) -> None:
        self._met = met
        self._most = most
        # Or ids could be made that are drawn every time.
        self._salt = os.urandom(16) if salt is None else salt
        self._in_view: dict[str, None] = {}  # those in view for longest first

    def choose(self, members: Mapping[str, Member], draw: int) -> dict[str, Member]:
        """Return the ``members`` that are kept.

        ``draw``: a number that is another when newcomers are to be drawn anew.
        """
        order = [peer for peer in self._in_view if peer in members]
        order += sorted(members.keys() - set(order), key=bits_of)  # the same on all nodes
        if len(order) > self._most:
            order = self._best(order, members, draw)
        self._in_view = dict.fromkeys(order)
        return {peer: members[peer] for peer in order}

    def _best(self, order: list[str], members: Mapping[str, Member], draw: int) -> list[str]:
        ranked = known_first(
            ((peer, host_of(next(iter(members[peer].addresses), ""))) for peer in order), self._met
        )
        kept = ranked[: self._most - self._most // NEWCOMERS]
        rest = sorted(
            ranked[len(kept) :],
            key=lambda peer: hashlib.sha256(self._salt + f"{draw} {peer}".encode()).digest(),
        )
        chosen = {*kept, *rest[: self._most - len(kept)]}
        return [peer for peer in order if peer in chosen]


log = logging.getLogger(__name__)

State = Literal["waiting", "training", "leaving", "done"]

# seconds: how long a record lives, and how often one is published and all are read
TTL = 30.0
PERIOD = 5.0
MET = 256  # of the peers met last, whose records are looked for however many others there are
DRAW = 60.0  # seconds after which other newcomers get a place, if there is no room for all
GAP = 1.0  # seconds between two publications or two readings, at least
HASTE = 0.5  # seconds between readings while a caller waits for members
SLOW, REST = (
    1.0,
    3.0,
    # seconds of a reading, or of a publication, beyond which so many times as many follow in which
    # there is none
)
CLOCK = 60.0  # seconds a record may be dated ahead of our clock
AGAIN = (
    2  # readings after the first one of a stranger, which finds where in the swarm's buckets it is
)
MAX_ADDRESSES = 8
MAX_PUBLISHED = 64  # of this node's records whose dates are kept: all that may live, and more
CLOCKS_APART_S = 3.0  # seconds by which the clocks of two machines may differ
HERE: tuple[State, ...] = ("waiting", "training")


class Directory:
    """Members of ``swarm`` as the node with ``identity`` sees them.

    The host must have a `MemberValidator`.

    ``ttl``: seconds after which a silent peer is no longer a member, the same in all of a swarm.
    ``period``: seconds between two publications, and two readings. ``cap``: records per DHT key.
    ``limit``: the largest number of members in view, and about as many are read. ``met``: where
    this node met a peer, the newest last (`Room`). ``bucket``, ``epoch_s``: a manifest's;
    ``breadth``: of a visitor's view (`Index`). ``barred``: predicate of peers to leave out of
    ``members`` and ``departed``; it is called often, from any thread, and must be quick. It may be
    set later, because bans are known only after the directory exists. ``access_policy``: a peer
    that it does not admit is never listed, whatever the records say.
    """

    def __init__(
        self,
        host: Host,
        identity: Identity,
        swarm: str,
        *,
        ttl: float = TTL,
        period: float = PERIOD,
        cap: int = dht.CAP,
        limit: int = ROOM,
        barred: Callable[[str], bool] = lambda peer: False,
        access_policy: AccessPolicy | None = None,
        met: Mapping[str, str] | None = None,
        bucket: int = 0,
        epoch_s: float = 60.0,
        breadth: int = 0,
    ) -> None:
        if not 0 < period < ttl < MAX_TTL:
            raise ValueError(f"0 < period < ttl < {MAX_TTL:g} seconds, please")
        self._host = host
        self._identity = identity
        self._swarm = swarm
        self._ttl = ttl
        self._period = period
        self._cap = cap
        self.skew = 0.0
        """Seconds to add to this machine's clock for that of the others, which epochs and dates of
        records go by.
        """
        self.dialled: Reach = "unknown"
        """Who can dial this node without a relay, as peers found that were asked
        (`shoal.swarm.p2p.reachability.reach_of`).
        """
        self.ways: Callable[[], tuple[bool, float]] = lambda: (False, 0.0)
        """Returns whether exchanges go past a relay (`shoal.swarm.p2p.punch`), and the bytes a
        second that they move.
        """
        self.change: Callable[[], int] = lambda: 0
        """Returns the number of the newest change of the swarm's settings that this node holds."""
        dates: dict[str, Callable[..., float]] = {
            "clock": self.now,
            "issued": lambda member: member.issued,
        }
        self._index = Index(
            swarm,
            identity.peer_id,
            bucket=bucket,
            epoch_s=epoch_s,
            cap=cap,
            limit=limit,
            breadth=breadth,
            **dates,
        )
        self._met = {} if met is None else met
        self._room = Room(self._met, limit)
        self.barred = barred
        self.access_policy = access_policy or AccessPolicy()
        self._changed = threading.Condition()  # guards the next four
        self._seen: dict[
            str, Member
        ] = {}  # the newest live record of every peer, those that left included
        self._mine: dict[str, Any] | None = None
        self._urgent = False  # a change that others should know at once
        self._waiting = 0
        self._look_soon = False
        self._began = self.now()
        self._published: deque[float] = deque(maxlen=MAX_PUBLISHED)  # dates of this node's records
        self._earlier: float | None = None  # date of a record of an earlier run, if one was read
        self._twin = ""
        self._prefix: str | None = None  # under which the own record is stored
        self._keys: dict[str, dht.Names] = {}  # the trie as last read
        self._said = Repeats()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake_reader = asyncio.Event()
        self._wake_publisher = asyncio.Event()
        self._looked = asyncio.Event()
        # A record that says leaving must not be overtaken by an earlier one.
        self._publishing = asyncio.Lock()
        self._run_future = host.submit(self._run())

    # -- any thread --------------------------------------------------------------------------------

    def announce(self, **fields: Any) -> None:
        """Set the fields of this node's `Member` record, but for who and where it is, and return at
        once.

        A new round or state is published as soon as possible, anything else with the next period.
        Raises pydantic's ValidationError if `Member` does not allow a field, or lacks one.
        """
        self._member(fields)
        with self._changed:
            old = self._mine
            self._mine = fields
            if old is None or any(old[name] != fields[name] for name in ("round", "state")):
                self._urgent = True
            self._changed.notify_all()
        if self._urgent:
            self._wake_up()

    def renew(self) -> None:
        """Publish this node's record soon, because something in it is new.

        Returns at once; thread-safe.
        """
        with self._changed:
            self._urgent = self._mine is not None
        self._wake_up()

    def own(self) -> Member | None:
        """Return this node's record as published now; None before the first `announce`."""
        with self._changed:
            mine = self._mine
        return None if mine is None else self._member(mine)

    def members(self) -> dict[str, Member]:
        """Return the newest record of each peer that waits or trains, by peer id: this node's too,
        but not of barred peers.

        In a swarm of buckets these are the peers of this node's. Like the methods below, it uses no
        network.
        """
        return {
            p: member
            for p, member in self.everyone().items()
            if not self.is_barred(p) and self._index.shows(p)
        }

    def everyone(self) -> dict[str, Member]:
        """Return `members`, the barred ones, which verifiers still reach, and those of the buckets
        that this node was just in.
        """
        return {peer: member for peer, member in self._live().items() if member.state in HERE}

    def addresses(self, peer: str) -> tuple[str, ...]:
        """Return the addresses that ``peer`` announces, barred or not; none if it is not known."""
        member = self.everyone().get(peer)
        return () if member is None else tuple(member.addresses)

    def is_barred(self, peer: str) -> bool:
        """Return whether this node ignores ``peer``; never true of itself."""
        return peer != self._identity.peer_id and (
            self.access_policy.blocks(peer) or self.barred(peer)
        )

    def knows(self, peer: str) -> bool:
        """Return whether a record of ``peer`` was read lately. Quick and thread-safe."""
        return peer in self._seen

    def departed(self) -> dict[str, Member]:
        """Return the last record of each peer that left or finished within the last ``ttl``
        seconds, by peer id.

        Barred peers are left out: nobody was paired with them, so a late node must not take them
        for somebody's partner.
        """
        gone = {
            p: member
            for p, member in self._live().items()
            if member.state not in HERE and not self.is_barred(p)
        }
        return {p: member for p, member in gone.items() if self._index.shows(p)}

    def belongs(self, peer: str) -> bool:
        return self._index.shows(peer)

    def size(self) -> int:
        """Return the number of members; in a swarm of buckets an estimate by this node's, and exact
        if that is the only one.
        """
        return self._index.size(len(self.members()))

    def look(self) -> None:
        """Read soon, at most once a second, because an unknown peer appeared.

        Returns at once; thread-safe.
        """
        self._look_soon = True
        self._wake_up()

    def hear(self, member: Member) -> bool:
        """Take a record from its author's own hand, as if it had been read; return whether it is
        credible. Thread-safe.
        """
        credible = self._credible(member.peer, "", VerifiedRecord("", member))
        with self._changed:
            if credible and (
                member.peer not in self._seen or member.issued > self._seen[member.peer].issued
            ):
                self._seen[member.peer] = member
        return credible

    def refresh(self, timeout: float) -> None:
        """Read now, and again where the depth of the bucket moved.

        NetworkError: the first fails, or takes ``timeout`` seconds.
        """
        until = time.monotonic() + timeout
        self._host.call(self._read(), timeout)
        with contextlib.suppress(NetworkError):  # the first reading will do
            for _ in range(AGAIN * self._index.moved):
                self._host.call(self._read(), max(until - time.monotonic(), 0.01))

    def twin(self) -> str:
        """Return where another node is that runs with this node's key, as seen since the last call;
        nothing without one.
        """
        found = self._twin
        self._twin = ""
        return found

    def first_twin(self, should_stop: Callable[[], bool] = lambda: False) -> str:
        """Return the same before this node publishes anything.

        Takes no time, unless a record in this node's name was read: of another node, which renews
        it, or of an earlier run of this one.
        """
        end = self._began + CLOCKS_APART_S + self._period + GAP
        while self._earlier is not None and not self._twin and self.now() < end:
            if self._closed or should_stop():
                break
            with contextlib.suppress(NetworkError):
                self.refresh(self._period)
            time.sleep(HASTE)
        return self.twin()

    def wait_for(
        self, count: int, timeout: float, should_stop: Callable[[], bool] = lambda: False
    ) -> bool:
        """Wait until there are ``count`` members (`size`), this node included; return False after
        ``timeout`` seconds or a stop.
        """
        end = time.monotonic() + timeout
        with self._changed:
            self._waiting += 1
        self._wake_up()
        try:
            while self.size() < count:
                left = end - time.monotonic()
                if left <= 0 or self._closed or should_stop():
                    return False
                with self._changed:
                    self._changed.wait(min(left, 0.1))
            return True
        finally:
            with self._changed:
                self._waiting -= 1

    def leave(self, timeout: float) -> bool:
        """Announce that this node leaves, so that no peer waits for it, then `close`.

        Return False if no node took the record.
        """
        with self._changed:
            if self._mine is not None:
                self._mine = {**self._mine, "state": "leaving"}
        announced = True
        try:
            if self._mine is not None:
                announced = self._host.call(self._publish(), timeout)
        except NetworkError as error:
            log.info("the swarm was not informed that this node leaves: %s", error)
            announced = False
        self.close()
        return announced

    def close(self) -> None:
        """Stop publishing and reading; the own record expires within ``ttl`` seconds."""
        self._closed = True
        self._run_future.cancel()

    def now(self) -> float:
        """Return Unix seconds by the others' clock."""
        return time.time() + self.skew

    def _live(self) -> dict[str, Member]:
        oldest = self.now() - self._ttl
        with self._changed:
            seen = {
                peer: member
                for peer, member in self._seen.items()
                if member.issued >= oldest and self.access_policy.admits(peer)
            }
            mine = self._mine
        if mine is not None:
            seen[self._identity.peer_id] = self._member(mine)
        else:
            seen.pop(self._identity.peer_id, None)  # of an earlier run
        return seen

    def reach(self) -> dict[str, Any]:
        """Return by which way others reach this node, and the bytes a second of its exchanges:
        fields of a `Member`.
        """
        relayed = self.dialled != "direct" and any(
            "/p2p-circuit" in address for address in self._host.addresses()
        )
        punched, throughput = self.ways()
        return {
            "reach": ("punched" if punched else "relayed") if relayed else self.dialled,
            "throughput": rate(throughput),
        }

    def _member(self, fields: dict[str, Any]) -> Member:
        return Member(
            swarm=self._swarm,
            peer=self._identity.peer_id,
            addresses=self._host.addresses()[:MAX_ADDRESSES],
            **self.reach(),
            issued=self.now(),
            admission=self.access_policy.ticket,
            change=self.change(),
            **fields,
        )

    def _wake_up(self) -> None:
        if self._loop is not None and not self._closed:
            try:
                self._loop.call_soon_threadsafe(self._wake_reader.set)
                self._loop.call_soon_threadsafe(self._wake_publisher.set)
            except RuntimeError:
                log.debug("the host closed before the directory")

    # -- on the loop -------------------------------------------------------------------------------

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        # Two loops, because others must hear of this node however long its reading takes.
        await asyncio.gather(self._keep_reading(), self._keep_publishing())

    async def _keep_reading(self) -> None:
        read = float("-inf")
        while not self._closed:
            self._wake_reader.clear()
            now = time.monotonic()
            # Less than any pause below.
            if (
                self._waiting
                or now - read >= (GAP if self._look_soon else self._period * 0.75)
                or self._prefix is None
            ):
                read = now
                self._look_soon = False
                await self._guarded(self._read)
            self._looked.set()
            await self._rest(now)
            hasty = (
                self._waiting
                or self._look_soon
                or (self._mine is not None and self._prefix is None)
            )
            await self._sleep(self._wake_reader, HASTE if hasty else self._pause())

    async def _keep_publishing(self) -> None:
        await self._looked.wait()  # where the record belongs follows from what the keys hold
        published = float("-inf")
        while not self._closed:
            self._wake_publisher.clear()
            now = time.monotonic()
            if self._mine is not None and (self._urgent or now - published >= self._period * 0.75):
                published = now
                await self._guarded(self._publish)
                await self._rest(now)
            await self._sleep(
                self._wake_publisher,
                HASTE if self._mine is not None and self._prefix is None else self._pause(),
            )
            since = time.monotonic() - published
            if self._urgent and since < GAP:
                await asyncio.sleep(GAP - since)

    async def _guarded(self, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        try:
            await work()
        except NetworkError as error:
            log.info("the directory is not up to date: %s", error)
        except Exception as error:  # a bug must not make this node vanish from the swarm
            self._host.internal_errors.caught("directory", error)

    async def _rest(self, since: float) -> None:
        """Wait after work that took long: on a machine or a link with too much to do, peers in
        haste would starve each other.
        """
        took = time.monotonic() - since
        if took > SLOW:
            await asyncio.sleep(min(REST * took, self._ttl / 6))

    def _pause(self) -> float:
        """Return seconds until the next look or record: not in step with other nodes that started
        at the same moment.
        """
        return self._period * random.uniform(0.8, 1.0)

    async def _sleep(self, wake: asyncio.Event, seconds: float) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(wake.wait(), seconds)

    async def _read(self) -> None:
        async def under(prefix: str) -> dict[str, Member]:
            values = await self._host.get(key_of(self._swarm, prefix))
            first = heapq.nsmallest(dht.CROWD * self._cap, values, key=bits_of)
            opened = ((peer, open_record(values[peer])) for peer in first)
            return {
                p: r.member for p, r in opened if r is not None and self._credible(p, prefix, r)
            }

        known = {peer for peer in self._seen if peer in self._met}.union(list(self._met)[-MET:])
        keys = await self._index.read(under, now=self._prefix, known=known)
        self._keys = {prefix: dict.fromkeys(names) for prefix, names in keys.items()}
        found = [
            member
            for names in keys.values()
            for member in names.values()
            if isinstance(member, Member)
        ]
        self._look_for_twin(found)
        oldest = self.now() - self._ttl
        with self._changed:
            seen = {peer: member for peer, member in self._seen.items() if member.issued >= oldest}
            for member in found:
                if member.peer not in seen or member.issued > seen[member.peer].issued:
                    seen[member.peer] = member
            self._seen = self._room.choose(seen, int(time.time() / DRAW))
            self._urgent = self._urgent or self._index.moved
            self._changed.notify_all()
        if self._index.moved:
            self.look()
        # One address each: a few peers are enough to find the swarm again.
        others = (m for m in found if m.peer != self._identity.peer_id and m.state in HERE)
        self._host.remember(
            a for m in others for a in m.addresses[:1] if a.endswith(f"/p2p/{m.peer}")
        )

    def _look_for_twin(self, found: Sequence[Member]) -> None:
        """Note a record in this node's name that it did not publish, which another node with its
        key must have.
        """
        for member in found:
            foreign = member.peer == self._identity.peer_id and member.issued not in self._published
            if foreign and member.state in HERE:
                if member.issued > self._began + CLOCKS_APART_S:
                    self._twin = next(iter(member.addresses), "an unknown address")
                else:
                    self._earlier = member.issued

    def _credible(self, peer: str, prefix: str, record: VerifiedRecord) -> bool:
        member = record.member
        if member.peer != peer or member.swarm != self._swarm or record.prefix != prefix:
            return False
        if member.issued > self.now() + CLOCK:
            if self._said.due(peer):
                log.warning(
                    "peer %s is ignored: its clock, or ours, is wrong by more than %g s",
                    short(peer),
                    CLOCK,
                )
            return False
        return self.access_policy.record(
            peer, member.admission, member.issued, member.state in HERE
        )

    async def _publish(self) -> bool:
        async with self._publishing:
            with self._changed:
                fields = self._mine
                self._urgent = False
            if fields is None:
                return False
            me = self._identity.peer_id
            for prefix in self._index.places(self._prefix, self._keys):
                record = self._member(fields)  # each dated: a store may take seconds
                self._published.append(record.issued)
                value = make_record(prefix, record, self._identity)
                if not await self._host.store(
                    key_of(self._swarm, prefix), me, value, self._ttl + self.skew
                ):
                    raise NetworkError("no node of the swarm took this node's record.")
                self._prefix = prefix
            return True
