"""The directory of a swarm: every node publishes a signed, expiring record of itself in the DHT,
and reads the others'.

    directory = Directory(host, identity, swarm)
    directory.announce(name="anna", state="training", ...)
    directory.members()

It is made of a table of members (`member_table`), what reads records into it (`record_reader`),
what publishes the own one (`own_record_publisher`), and the loops in which both happen
(`directory_loops`). Only `refresh`, `wait_for` and `leave` wait for the network.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from shoal.swarm.access.policy import AccessPolicy
from shoal.swarm.errors import NetworkError
from shoal.swarm.identity import Identity
from shoal.swarm.membership import trie
from shoal.swarm.membership.bucket_index import Index
from shoal.swarm.membership.directory_loops import HASTE_S, MIN_GAP_S, PERIOD_S, DirectoryLoops
from shoal.swarm.membership.member_table import MemberTable
from shoal.swarm.membership.own_record import OwnRecord
from shoal.swarm.membership.own_record_publisher import OwnRecordPublisher
from shoal.swarm.membership.record_reader import RecordReader
from shoal.swarm.membership.records import MAX_TTL_S, VerifiedRecord
from shoal.swarm.membership.room import MAX_IN_VIEW, Room
from shoal.swarm.membership.twin_watch import CLOCKS_APART_S, TwinWatch
from shoal.swarm.wire.messages import Member
from shoal.swarm.wire.record import State

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host

log = logging.getLogger(__name__)

PRESENT: tuple[State, ...] = ("waiting", "training")

TTL_S = 30.0
"""That a record lives."""
MAX_REST_SHARE = 1 / 6
"""Of that time, for which a directory rests, at most."""
WAIT_STEP_S = 0.1
"""Between two looks at whether a caller wants to stop waiting."""
FURTHER_READINGS = 2
"""After the first one of a stranger, which finds where in the swarm's buckets it is."""


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
        self._host = host
        self._peer = identity.peer_id
        self._period = period
        met = {} if met is None else met
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
        self._twins = TwinWatch(identity.peer_id, self.now())
        self._table = MemberTable(Room(met, limit), ttl=ttl, now=self.now)
        self._reader = RecordReader(
            host,
            swarm,
            self._index,
            cap=cap,
            met=met,
            access_policy=self.access_policy,
            now=self.now,
        )
        self._publisher = OwnRecordPublisher(
            host,
            identity,
            swarm,
            self.own_record,
            self._index,
            lives=lambda: self._table.ttl + self.skew,
        )
        self._loops = DirectoryLoops(
            self._read,
            self._publish,
            self._publisher,
            lambda: self._host.internal_errors,
            period=period,
            max_rest=lambda: self._table.ttl * MAX_REST_SHARE,
        )
        self._run_future = host.submit(self._loops.run())

    # -- any thread --------------------------------------------------------------------------------

    def announce(self, **fields: Any) -> None:
        """Set the fields of this node's `Member` record, but for who and where it is, and return at
        once.

        A new round or state is published as soon as possible, anything else with the next period.
        Raises pydantic's ValidationError if `Member` does not allow a field, or lacks one.
        """
        self._publisher.announce(fields)
        self._table.notify()
        if self._publisher.urgent:
            self._loops.wake()

    def renew(self) -> None:
        """Publish this node's record soon, because something in it is new.

        Returns at once; thread-safe.
        """
        self._publisher.renew()
        self._loops.wake()

    def own(self) -> Member | None:
        """Return this node's record as published now; None before the first `announce`."""
        return self._publisher.own()

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
        if peer == self._peer:
            return False
        return self.access_policy.blocks(peer) or self.barred(peer)

    def knows(self, peer: str) -> bool:
        """Return whether a record of ``peer`` was read lately. Quick and thread-safe."""
        return self._table.knows(peer)

    def vouches(self, peer: str) -> bool:
        """Return whether ``peer`` is a member, or left lately; in a swarm of buckets also of one of
        another bucket, whose members nobody here knows.
        """
        return self._table.knows(peer) or not self._index.shows(peer)

    def reachable(self) -> dict[str, tuple[str, ...]]:
        """Return the addresses of the other members that have some."""
        found = {}
        for peer, member in self.everyone().items():
            if peer != self._peer and member.addresses and not self.access_policy.denies(peer):
                found[peer] = tuple(member.addresses)
        return found

    def departed(self) -> dict[str, Member]:
        """Return the last record of each peer that left or finished within the last ``ttl``
        seconds, by peer id.

        Barred peers are left out: nobody was paired with them, so a late node must not take them
        for somebody's partner.
        """
        live = self._live()
        gone = {peer: member for peer, member in live.items() if member.state not in PRESENT}
        return self._shown(gone)

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
        self._loops.look()

    def hear(self, member: Member) -> bool:
        """Take a record from its author's own hand, as if it had been read; return whether it is
        credible. Thread-safe.
        """
        credible = self._reader.is_credible(member.peer, "", VerifiedRecord("", member))
        if credible:
            self._table.hear(member)
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
            if self._loops.closed or should_stop():
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
        with self._loops.in_haste():
            while self.size() < count:
                left = end - time.monotonic()
                if left <= 0 or self._loops.closed or should_stop():
                    return False
                self._table.wait(min(left, WAIT_STEP_S))
            return True

    def leave(self, timeout: float) -> bool:
        """Announce that this node leaves, so that no peer waits for it, then `close`.

        Return False if no node took the record.
        """
        self._publisher.take_back()
        announced = True
        try:
            if self._publisher.announced:
                announced = self._host.call(self._publish(), timeout)
        except NetworkError as error:
            log.info("the swarm was not informed that this node leaves: %s", error)
            announced = False
        self.close()
        return announced

    def close(self) -> None:
        """Stop publishing and reading; the own record expires within ``ttl`` seconds."""
        self._loops.closed = True
        self._run_future.cancel()

    def now(self) -> float:
        """Return Unix seconds by the others' clock."""
        return time.time() + self.skew

    def _shown(self, members: Mapping[str, Member]) -> dict[str, Member]:
        """Return those that are not barred, and in this node's bucket."""
        shown = {}
        for peer, member in members.items():
            if not self.is_barred(peer) and self._index.shows(peer):
                shown[peer] = member
        return shown

    def _live(self) -> dict[str, Member]:
        """Return the live records of admitted peers, and this node's own."""
        live = {}
        for peer, member in self._table.live().items():
            if self.access_policy.admits(peer):
                live[peer] = member
        own = self.own()
        if own is not None:
            live[self._peer] = own
        else:
            live.pop(self._peer, None)  # of an earlier run
        return live

    # -- on the loop -------------------------------------------------------------------------------

    async def _read(self) -> None:
        seen = self._table.peers()
        found = await self._reader.read(stored_under=self._publisher.prefix, seen=seen)
        present = [member for member in found if member.state in PRESENT]
        self._twins.look(present)
        if self._index.moved:
            self._publisher.urgent = True
        self._table.take(found)
        if self._index.moved:
            self.look()
        self._remember(present)

    async def _publish(self) -> bool:
        return await self._publisher.publish(self._reader.keys, self._twins.note_published)

    def _remember(self, members: Collection[Member]) -> None:
        """Note one address of each other member: a few peers are enough to find the swarm again."""
        addresses = []
        for member in members:
            if member.peer == self._peer:
                continue
            own = [one for one in member.addresses[:1] if one.endswith(f"/p2p/{member.peer}")]
            addresses += own
        self._host.remember(addresses)
