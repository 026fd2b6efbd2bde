"""The directory of a swarm: every node publishes a signed, expiring record of itself in the DHT,
and reads the others'.

Only `Directory.refresh`, `wait_for` and `leave` wait for the network. Records are published and
read in the background on the host's loop, and `members` is the newest view.
`shoal.swarm.membership.bucket_index` has the keys, `room` which members are kept when there are too
many.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import random
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Literal

from shoal.swarm.access.policy import AccessPolicy
from shoal.swarm.errors import NetworkError, Repeats
from shoal.swarm.identity import Identity
from shoal.swarm.membership import trie
from shoal.swarm.membership.bucket_index import Index
from shoal.swarm.membership.own_record import OwnRecord
from shoal.swarm.membership.records import (
    MAX_TTL_S,
    VerifiedRecord,
    bits_of,
    key_of,
    make_record,
    open_record,
)
from shoal.swarm.membership.room import MAX_IN_VIEW, Room
from shoal.swarm.membership.twin_watch import CLOCKS_APART_S, TwinWatch
from shoal.swarm.p2p.stream import short
from shoal.swarm.wire.messages import Member

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host

log = logging.getLogger(__name__)

State = Literal["waiting", "training", "leaving", "done"]
PRESENT: tuple[State, ...] = ("waiting", "training")

TTL_S = 30.0  # that a record lives
PERIOD_S = 5.0  # between two publications, and between two readings
# Shares of a period after which one is due: less than the pauses below, which are random, so that
# nodes that started at the same moment do not stay in step.
DUE_SHARE = 0.75
MIN_PAUSE_SHARE = 0.8
MAX_MET_READ = 256  # of the peers met last, looked for however many others there are
NEWCOMER_DRAW_S = 60.0  # after which other newcomers get a place, if there is no room for all
MIN_GAP_S = 1.0  # between two publications or two readings
HASTE_S = 0.5  # between readings while a caller waits for members
WAIT_STEP_S = 0.1  # between two looks at whether a caller wants to stop waiting
# After work that took longer than the first, so many times as long there is none: on a machine or
# a link with too much to do, peers in haste would starve each other.
SLOW_WORK_S = 1.0
REST_FACTOR = 3.0
MAX_CLOCK_AHEAD_S = 60.0  # that a record may be dated ahead of our clock
# Readings after the first one of a stranger, which finds where in the swarm's buckets it is.
FURTHER_READINGS = 2


class Wakeups:
    """Events of the loops that read and publish; `wake` is for any thread."""

    def __init__(self) -> None:
        self.reader = asyncio.Event()
        self.publisher = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(self) -> None:
        self._loop = asyncio.get_running_loop()

    def wake(self) -> None:
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(self.reader.set)
            self._loop.call_soon_threadsafe(self.publisher.set)
        except RuntimeError:
            log.debug("the host closed before the directory")


class Directory:
    """Members of ``swarm`` as the node with ``identity`` sees them.

    The host must have a `MemberValidator`.

    ``ttl``: seconds after which a silent peer is no longer a member, the same in all of a swarm.
    ``period``: seconds between two publications, and two readings. ``cap``: records per DHT key.
    ``limit``: the largest number of members in view, and about as many are read. ``met``: where
    this node met a peer, the newest last (`Room`). ``bucket``, ``epoch_s``: a manifest's;
    ``breadth``: of a visitor's view (`Index`). ``access_policy``: a peer that it does not admit is
    never listed, whatever the records say.
    """

    def __init__(
        self,
        host: Host,
        identity: Identity,
        swarm: str,
        *,
        ttl: float = TTL_S,
        period: float = PERIOD_S,
        cap: int = trie.CAP,
        limit: int = MAX_IN_VIEW,
        barred: Callable[[str], bool] = lambda peer: False,
        access_policy: AccessPolicy | None = None,
        met: Mapping[str, str] | None = None,
        bucket: int = 0,
        epoch_s: float = 60.0,
        breadth: int = 0,
    ) -> None:
        if not 0 < period < ttl < MAX_TTL_S:
            raise ValueError(f"0 < period < ttl < {MAX_TTL_S:g} seconds, please")
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
        self.barred = barred
        """Predicate of peers to leave out of `members` and `departed`. It is called often, from any
        thread, and must be quick. It may be set later, because bans are known only after the
        directory exists.
        """
        self.access_policy = access_policy or AccessPolicy()
        self.own_record = OwnRecord(
            swarm,
            identity.peer_id,
            addresses=lambda: self._host.addresses(),
            now=lambda: self.now(),
            ticket=lambda: self.access_policy.ticket,
        )
        self._index = Index(
            swarm,
            identity.peer_id,
            bucket=bucket,
            epoch_s=epoch_s,
            clock=self.now,
            issued=lambda member: float(member.issued),
            cap=cap,
            limit=limit,
            breadth=breadth,
        )
        self._met = {} if met is None else met
        self._room = Room(self._met, limit)
        self._twins = TwinWatch(identity.peer_id, self.now())
        self._changed = threading.Condition()  # guards the next four
        self._seen: dict[str, Member] = {}  # newest live records, of those that left too
        self._urgent = False  # a change that others should know at once
        self._waiting = 0
        self._look_soon = False
        self._prefix: str | None = None  # under which the own record is stored
        self._keys: dict[str, trie.Names] = {}  # the keys as last read
        self._said = Repeats()
        self._closed = False
        self._wakeups = Wakeups()
        self._was_read = asyncio.Event()
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
        self.own_record.member(fields)
        with self._changed:
            old = self.own_record.announced
            self.own_record.announced = fields
            if old is None or (old["round"], old["state"]) != (fields["round"], fields["state"]):
                self._urgent = True
            self._changed.notify_all()
        if self._urgent:
            self._wake_up()

    def renew(self) -> None:
        """Publish this node's record soon, because something in it is new.

        Returns at once; thread-safe.
        """
        with self._changed:
            self._urgent = self.own_record.announced is not None
        self._wake_up()

    def own(self) -> Member | None:
        """Return this node's record as published now; None before the first `announce`."""
        with self._changed:
            fields = self.own_record.announced
        return None if fields is None else self.own_record.member(fields)

    def members(self) -> dict[str, Member]:
        """Return the newest record of each peer that waits or trains, by peer id: this node's too,
        but not of barred peers.

        In a swarm of buckets these are the peers of this node's. Like the methods below, it uses no
        network.
        """
        return self._shown(self.everyone())

    def everyone(self) -> dict[str, Member]:
        """Return `members`, the barred ones, which verifiers still reach, and those of the buckets
        that this node was just in.
        """
        return {peer: member for peer, member in self._live().items() if member.state in PRESENT}

    def addresses(self, peer: str) -> tuple[str, ...]:
        """Return the addresses that ``peer`` announces, barred or not; none if it is not known."""
        member = self.everyone().get(peer)
        return () if member is None else tuple(member.addresses)

    def is_barred(self, peer: str) -> bool:
        """Return whether this node ignores ``peer``; never true of itself."""
        if peer == self._identity.peer_id:
            return False
        return self.access_policy.blocks(peer) or self.barred(peer)

    def knows(self, peer: str) -> bool:
        """Return whether a record of ``peer`` was read lately. Quick and thread-safe."""
        return peer in self._seen

    def departed(self) -> dict[str, Member]:
        """Return the last record of each peer that left or finished within the last ``ttl``
        seconds, by peer id.

        Barred peers are left out: nobody was paired with them, so a late node must not take them
        for somebody's partner.
        """
        live = self._live()
        return self._shown({p: member for p, member in live.items() if member.state not in PRESENT})

    def belongs(self, peer: str) -> bool:
        """Return whether ``peer``, if it is a member, is in this node's bucket."""
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
        if credible:
            with self._changed:
                _keep_newest(self._seen, member)
        return credible

    def refresh(self, timeout: float) -> None:
        """Read now, and again where the depth of the bucket moved.

        NetworkError: the first fails, or takes ``timeout`` seconds.
        """
        until = time.monotonic() + timeout
        self._host.call(self._read(), timeout)
        with contextlib.suppress(NetworkError):  # the first reading will do
            for _ in range(FURTHER_READINGS * self._index.moved):
                self._host.call(self._read(), max(until - time.monotonic(), 0.01))

    def twin(self) -> str:
        """Return where another node is that runs with this node's key, as seen since the last call;
        nothing without one.
        """
        seen_at = self._twins.seen_at
        self._twins.seen_at = ""
        return seen_at

    def first_twin(self, should_stop: Callable[[], bool] = lambda: False) -> str:
        """Return the same before this node publishes anything.

        Takes no time, unless a record in this node's name was read: of another node, which renews
        it, or of an earlier run of this one.
        """
        twins = self._twins
        end = twins.began + CLOCKS_APART_S + self._period + MIN_GAP_S
        while twins.earlier and not twins.seen_at and self.now() < end:
            if self._closed or should_stop():
                break
            with contextlib.suppress(NetworkError):
                self.refresh(self._period)
            time.sleep(HASTE_S)
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
                    self._changed.wait(min(left, WAIT_STEP_S))
            return True
        finally:
            with self._changed:
                self._waiting -= 1

    def leave(self, timeout: float) -> bool:
        """Announce that this node leaves, so that no peer waits for it, then `close`.

        Return False if no node took the record.
        """
        own = self.own_record
        with self._changed:
            if own.announced is not None:
                own.announced = {**own.announced, "state": "leaving"}
        announced = True
        try:
            if own.announced is not None:
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

    def _shown(self, members: Mapping[str, Member]) -> dict[str, Member]:
        """Return those that are not barred, and in this node's bucket."""
        return {
            peer: member
            for peer, member in members.items()
            if not self.is_barred(peer) and self._index.shows(peer)
        }

    def _live(self) -> dict[str, Member]:
        oldest = self.now() - self._ttl
        with self._changed:
            live = {
                peer: member
                for peer, member in self._seen.items()
                if member.issued >= oldest and self.access_policy.admits(peer)
            }
            announced = self.own_record.announced
        if announced is not None:
            live[self._identity.peer_id] = self.own_record.member(announced)
        else:
            live.pop(self._identity.peer_id, None)  # of an earlier run
        return live

    def _wake_up(self) -> None:
        if not self._closed:
            self._wakeups.wake()

    # -- on the loop -------------------------------------------------------------------------------

    async def _run(self) -> None:
        self._wakeups.begin()
        # Two loops, because others must hear of this node however long its reading takes.
        await asyncio.gather(self._keep_reading(), self._keep_publishing())

    async def _keep_reading(self) -> None:
        read_at = float("-inf")
        while not self._closed:
            self._wakeups.reader.clear()
            now = time.monotonic()
            wait_s = MIN_GAP_S if self._look_soon else self._period * DUE_SHARE
            if self._waiting or self._prefix is None or now - read_at >= wait_s:
                read_at = now
                self._look_soon = False
                await self._guarded(self._read)
            self._was_read.set()
            await self._rest(now)
            is_hasty = self._waiting or self._look_soon or self._is_unplaced()
            await self._sleep(self._wakeups.reader, HASTE_S if is_hasty else self._pause_s())

    async def _keep_publishing(self) -> None:
        await self._was_read.wait()  # where the record belongs follows from what the keys hold
        published_at = float("-inf")
        while not self._closed:
            self._wakeups.publisher.clear()
            now = time.monotonic()
            is_due = self._urgent or now - published_at >= self._period * DUE_SHARE
            if is_due and self.own_record.announced is not None:
                published_at = now
                await self._guarded(self._publish)
                await self._rest(now)
            await self._sleep(
                self._wakeups.publisher, HASTE_S if self._is_unplaced() else self._pause_s()
            )
            since = time.monotonic() - published_at
            if self._urgent and since < MIN_GAP_S:
                await asyncio.sleep(MIN_GAP_S - since)

    def _is_unplaced(self) -> bool:
        """Return whether there is a record to publish, and none was yet."""
        return self.own_record.announced is not None and self._prefix is None

    async def _guarded(self, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        try:
            await work()
        except NetworkError as error:
            log.info("the directory is not up to date: %s", error)
        except Exception as error:  # a bug must not make this node vanish from the swarm
            self._host.internal_errors.caught("directory", error)

    async def _rest(self, since: float) -> None:
        """Wait after work that took long."""
        took = time.monotonic() - since
        if took > SLOW_WORK_S:
            await asyncio.sleep(min(REST_FACTOR * took, self._ttl / 6))

    def _pause_s(self) -> float:
        """Return seconds until the next look or record."""
        return self._period * random.uniform(MIN_PAUSE_SHARE, 1.0)

    async def _sleep(self, wake: asyncio.Event, seconds: float) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(wake.wait(), seconds)

    async def _read(self) -> None:
        last_met = list(self._met)[-MAX_MET_READ:]
        known = {peer for peer in self._seen if peer in self._met}.union(last_met)
        keys = await self._index.read(self._read_key, now=self._prefix, known=known)
        self._keys = {prefix: dict.fromkeys(names) for prefix, names in keys.items()}
        found = []
        for names in keys.values():
            found += [member for member in names.values() if isinstance(member, Member)]
        present = [member for member in found if member.state in PRESENT]
        self._twins.look(present)
        self._take(found)
        if self._index.moved:
            self.look()
        self._remember(present)

    async def _read_key(self, prefix: str) -> dict[str, Member]:
        """Return the credible records under a key, by peer; of too many the first by their bits."""
        values = await self._host.get(key_of(self._swarm, prefix))
        members = {}
        for peer in heapq.nsmallest(trie.CROWD_FACTOR * self._cap, values, key=bits_of):
            record = open_record(values[peer])
            if record is not None and self._credible(peer, prefix, record):
                members[peer] = record.member
        return members

    def _take(self, found: Collection[Member]) -> None:
        """Take records that were read into the view."""
        oldest = self.now() - self._ttl
        with self._changed:
            seen = {peer: member for peer, member in self._seen.items() if member.issued >= oldest}
            for member in found:
                _keep_newest(seen, member)
            self._seen = self._room.choose(seen, int(time.time() / NEWCOMER_DRAW_S))
            self._urgent = self._urgent or self._index.moved
            self._changed.notify_all()

    def _remember(self, members: Collection[Member]) -> None:
        """Note one address of each other member: a few peers are enough to find the swarm again."""
        addresses = []
        for member in members:
            if member.peer == self._identity.peer_id:
                continue
            own = [one for one in member.addresses[:1] if one.endswith(f"/p2p/{member.peer}")]
            addresses += own
        self._host.remember(addresses)

    def _credible(self, peer: str, prefix: str, record: VerifiedRecord) -> bool:
        member = record.member
        if member.peer != peer or member.swarm != self._swarm or record.prefix != prefix:
            return False
        if member.issued > self.now() + MAX_CLOCK_AHEAD_S:
            if self._said.due(peer):
                log.warning(
                    "peer %s is ignored: its clock, or ours, is wrong by more than %g s",
                    short(peer),
                    MAX_CLOCK_AHEAD_S,
                )
            return False
        return self.access_policy.record(
            peer, member.admission, member.issued, member.state in PRESENT
        )

    async def _publish(self) -> bool:
        async with self._publishing:
            with self._changed:
                fields = self.own_record.announced
                self._urgent = False
            if fields is None:
                return False
            for prefix in self._index.places(self._prefix, self._keys):
                member = self.own_record.member(fields)  # each dated: a store may take seconds
                self._twins.note_published(member.issued)
                if not await self._host.store(
                    key_of(self._swarm, prefix),
                    self._identity.peer_id,
                    make_record(prefix, member, self._identity),
                    self._ttl + self.skew,
                ):
                    raise NetworkError("no node of the swarm took this node's record.")
                self._prefix = prefix
            return True


def _keep_newest(records: dict[str, Member], member: Member) -> None:
    """Put ``member`` in place of an earlier record of the same peer."""
    if member.peer not in records or member.issued > records[member.peer].issued:
        records[member.peer] = member
