"""The keys that one peer reads and publishes under, in a swarm with or without buckets.

In every epoch (so many seconds of Unix time) all peers are reassigned. A peer's position is a hash
of swarm, epoch and peer id; in its bucket are the peers whose position begins with the same
``depth`` bits. It publishes its record under that prefix, reads it, and is paired in it. At depth 0
there is one bucket, the trie of all members (`shoal.swarm.membership.trie`). How peers agree on the
depth, and change from one epoch to the next: docs/internals.md, "Buckets".
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.swarm.errors import NetworkError
from shoal.swarm.membership import trie
from shoal.swarm.membership.bucket_depth import MAX_BUCKET_DEPTH, agreed, depth_for
from shoal.swarm.membership.records import bits_in, bits_of, bucket_prefix, key_of, open_record
from shoal.swarm.membership.trie import CAP, KEYS_AT_ONCE, Get, Names, place, read_all

SIZE_SMOOTHING = 0.25  # weight of an epoch in the estimate of the swarm's size
# Ahead of an epoch its keys are written, and read. Two publications, or readings, are up to 9 s
# apart (a directory's period, and most of another when something wakes it), so all have published
# before anybody reads, and read before it begins.
PUBLISH_AHEAD_S = 19.0
READ_AHEAD_S = 9.5


@dataclass
class EpochBucket:
    """One peer's bucket of one epoch.

    ``bits``: its position; ``read``: whether the keys on its way were read.
    """

    epoch: int
    bits: str
    depth: int
    read: bool = False
    count: int = 1
    """Members seen in the bucket, this peer among them, and those that went deeper."""
    above: int = 0
    """Members of the bucket one level above that are not of this one, and publish there."""
    elsewhere: frozenset[str] = frozenset()
    """Peers that went one level deeper, into the other half of this bucket."""

    def prefix(self, depth: int) -> str:
        """Return the prefix of this peer's bucket at a ``depth`` of at least 1."""
        return bucket_prefix(self.epoch, self.bits[:depth])

    def other_half(self) -> str:
        """Return the prefix of the half of this bucket that this peer would not be in."""
        other_bit = "0" if self.bits[self.depth] == "1" else "1"
        return bucket_prefix(self.epoch, self.bits[: self.depth] + other_bit)


class Index:
    """The keys that one peer reads and publishes under: of its buckets, or with a ``bucket`` of 0
    of the whole trie.

    ``bucket``: most records in one. ``clock`` returns Unix seconds, ``issued`` when a record was
    made. ``cap`` and ``limit``: of the trie. ``breadth``: a visitor's, who is paired with nobody:
    it sees 2^breadth buckets, its own among them, or all if there are no more. All but `shows`,
    `depth`, `size` and `changes` run on one loop.
    """

    def __init__(
        self,
        swarm: str,
        me: str,
        *,
        bucket: int = 0,
        epoch_s: float = 60.0,
        clock: Callable[[], float],
        issued: Callable[[Any], float],
        cap: int = CAP,
        limit: int,
        breadth: int = 0,
    ) -> None:
        self._swarm = swarm
        self._me = me
        self._bucket = bucket
        self._epoch_s = epoch_s
        self._clock = clock
        self._issued = issued
        self._cap = cap
        self._limit = limit
        self._breadth = breadth
        self._epochs: tuple[EpochBucket, ...] = ()  # the newest that may be in effect first
        self._estimate: float | None = None  # members of the swarm
        self.moved = False
        """Whether the last reading changed a depth, so that others should know, and the keys there
        be read.
        """

    # -- any thread --------------------------------------------------------------------------------

    @property
    def depth(self) -> int:
        """The depth of the bucket in effect; 0: all members."""
        current = self._current()
        return 0 if current is None else current.depth

    def shows(self, peer: str) -> bool:
        """Return whether ``peer``, if it is a member, is in this peer's bucket now, or in one of
        those that a visitor sees.
        """
        current = self._current()
        if current is None:
            return True
        depth = self._view_depth(current)
        if not depth:
            return True
        if not bits_in(self._swarm, current.epoch, peer).startswith(current.bits[:depth]):
            return False
        return self._breadth > 0 or peer not in current.elsewhere

    def size(self, count: int) -> int:
        """Return about how many members a swarm has of which this peer sees ``count``; the very
        number if it sees all buckets.
        """
        current = self._current()
        return count if current is None else count << self._view_depth(current)

    def changes(self) -> float:
        """Return the Unix second at which the bucket changes next by itself; infinity if that is
        not known.
        """
        current = self._current()
        if current is None:
            return float("inf")
        later = [one.epoch for one in self._epochs if one.read and one.epoch > current.epoch]
        return min(later) * self._epoch_s if later else float("inf")

    def _view_depth(self, bucket: EpochBucket) -> int:
        """Return the depth of the part of the swarm that this peer sees: its bucket, or for a
        visitor so many levels above it.
        """
        return max(bucket.depth - self._breadth, 0)

    def _current(self) -> EpochBucket | None:
        epochs = self._epochs
        if not epochs:
            return None
        now = self._clock()
        for bucket in epochs:
            if bucket.read and bucket.epoch * self._epoch_s <= now:
                return bucket
        return epochs[-1]

    # -- on the loop -------------------------------------------------------------------------------

    def begin(self, size: int) -> None:
        """Begin as a member of a swarm that is known to have ``size`` others."""
        if self._bucket:
            self._estimate = float(size)
            self._advance()

    async def read(
        self, get: Get[Names], *, now: str | None, known: Collection[str] = ()
    ) -> dict[str, Names]:
        """Return the records under each prefix.

        ``now``: where the own record is. Raises NetworkError: the own key is not read.
        """
        if not self._bucket:
            return await self._read_trie(get, now, known, self._limit)
        self._advance()
        current = self._current()
        due = self._due(READ_AHEAD_S)
        depths = {one.epoch: self._depths_to_read(one) for one in due}
        limit = 2 * self._bucket
        if any(one.depth == 0 for one in due):
            limit = self._limit

        async def from_trie() -> dict[str, Names]:
            if not any(0 in levels for levels in depths.values()):
                return {}
            with contextlib.suppress(NetworkError):
                return await self._read_trie(get, now, known, limit)
            return {}

        in_trie, in_buckets = await asyncio.gather(
            from_trie(), read_all(get, _bucket_keys(due, depths))
        )
        found = in_trie | in_buckets
        self.moved = False
        for bucket in due:
            self._settle(bucket, depths[bucket.epoch], found)
        self._drop_past()
        if current is not None and not _was_read(current, found):
            raise NetworkError("the keys of this node's bucket could not be read.")
        if self._breadth and not self.moved and current is not None and current.depth:
            await self._read_around(get, current, found)
        return found

    async def _read_around(
        self, get: Get[Names], bucket: EpochBucket, found: dict[str, Names]
    ) -> None:
        """Read the other buckets of the part that a visitor sees, one level deeper too; keys that
        cannot be read are left out.
        """
        tops = [bucket.bits[: self._view_depth(bucket)]]
        for _ in range(self._view_depth(bucket), bucket.depth + 2):
            keys = [bucket_prefix(bucket.epoch, bits) for bits in tops if bits]
            keys = [key for key in keys if key not in found]
            for at in range(0, len(keys), KEYS_AT_ONCE):
                found |= await read_all(get, keys[at : at + KEYS_AT_ONCE])
            tops = [bits + bit for bits in tops for bit in "01"]

    def places(
        self, now: str | None, seen: Mapping[str, Names], chance: float | None = None
    ) -> tuple[str, ...]:
        """Return the prefixes to publish under, that of the trie last; ``now``, ``seen``,
        ``chance`` as in `place`.
        """
        due = self._due(PUBLISH_AHEAD_S)
        deep = [one.prefix(one.depth) for one in due if one.depth]
        if due and len(deep) == len(due):
            return tuple(deep)
        in_trie = place(self._me, _in_trie(now), seen, cap=self._cap, chance=chance)
        return (*deep, in_trie)

    def _read_trie(
        self, get: Get[Names], now: str | None, known: Collection[str], limit: int
    ) -> Awaitable[dict[str, Names]]:
        return trie.read(
            get, bits_of(self._me), now=_in_trie(now), cap=self._cap, limit=limit, known=known
        )

    def _due(self, ahead_s: float) -> list[EpochBucket]:
        """Return the bucket in effect, and those of later epochs that begin within ``ahead_s``."""
        current = self._current()
        if current is None:
            return []
        due = []
        for bucket in self._epochs:
            is_later = bucket.epoch > current.epoch
            begins_in = bucket.epoch * self._epoch_s - self._clock()
            if bucket is current or (is_later and begins_in <= ahead_s):
                due.append(bucket)
        return due

    def _epoch_at(self, seconds: float) -> int:
        return int(seconds / self._epoch_s)

    def _advance(self) -> None:
        """Draw the bucket of this epoch, and that of the next one shortly ahead of it."""
        now = self._clock()
        current = self._current()
        for epoch in dict.fromkeys((self._epoch_at(now), self._epoch_at(now + PUBLISH_AHEAD_S))):
            if any(one.epoch == epoch for one in self._epochs):
                continue
            if current is not None and current.read:
                self._update_estimate(current)
            depth = 0 if current is None else current.depth
            if self._estimate is not None:
                depth = depth_for(self._estimate, depth, self._bucket)
            new = EpochBucket(epoch, bits_in(self._swarm, epoch, self._me), depth)
            self._epochs = tuple(sorted((new, *self._epochs), key=lambda one: -one.epoch))

    def _update_estimate(self, bucket: EpochBucket) -> None:
        """Take what an epoch showed into the estimate of the swarm's size."""
        size = float(bucket.count << bucket.depth)
        # Where the other half of the swarm has come up, both are counted, in place of twice this
        # one. Deeper down, or by a few that came up, it would make parts that just met take the
        # swarm for small.
        if bucket.depth == 1 and 4 * bucket.above >= bucket.count:
            size = float(bucket.count + bucket.above)
        before = self._estimate
        # At depth 0 it is no estimate, and far from the last one it is no chance.
        if before is None or not bucket.depth or not before / 2 <= size <= 2 * before:
            self._estimate = size
        else:
            self._estimate = before + SIZE_SMOOTHING * (size - before)

    def _drop_past(self) -> None:
        """Drop the epochs that are over, and with a clock that was set back those that are not
        begun.
        """
        current = self._current()
        now = self._clock()
        first = self._epoch_at(now)
        last = self._epoch_at(now + PUBLISH_AHEAD_S)
        self._epochs = tuple(
            one for one in self._epochs if one is current or first <= one.epoch <= last
        )

    def _depths_to_read(self, bucket: EpochBucket) -> set[int]:
        """Return the depths whose keys are read: all on the way while a bucket is new, then its own
        and those beside it.
        """
        every = set(range(MAX_BUCKET_DEPTH + 1))
        if not bucket.read:
            return every
        if not bucket.depth and 2 * bucket.count <= self._bucket:
            return {0}
        return {bucket.depth - 1, bucket.depth, bucket.depth + 1} & every

    def _settle(
        self, bucket: EpochBucket, depths: Collection[int], found: Mapping[str, Names]
    ) -> None:
        """Agree on the depth by what was read, and count the members."""
        if not _was_read(bucket, found):
            return
        newest = self._newest_records(bucket, depths, found)
        gone = {
            peer
            for peer, record in found.get(bucket.other_half(), {}).items()
            if self._issued(record) >= newest.get(peer, (0.0, 0))[0]
        }
        there: dict[int, list[str]] = {depth: [] for depth in depths}
        for peer, (_, depth) in newest.items():
            if peer not in gone:
                there[depth].append(peer)

        def position(peer: str) -> str:
            return bits_in(self._swarm, bucket.epoch, peer)

        depth = agreed(bucket.depth, bucket.bits, there, position, self._bucket)
        bucket.read = True
        self.moved = self.moved or depth != bucket.depth
        bucket.elsewhere = frozenset(gone) if depth == bucket.depth else frozenset()
        bucket.depth = depth
        # With those who went deeper: without them the others would take the swarm for smaller than
        # it is, and never follow.
        own = bucket.bits[:depth]
        members = gone.union(newest)
        bucket.count = 1 + sum(position(peer).startswith(own) for peer in members)
        above = there.get(depth - 1, ())
        bucket.above = sum(not position(peer).startswith(own) for peer in above)

    def _newest_records(
        self, bucket: EpochBucket, depths: Collection[int], found: Mapping[str, Names]
    ) -> dict[str, tuple[float, int]]:
        """Return other peer -> when its newest record was made, and the depth where it is."""
        newest: dict[str, tuple[float, int]] = {}
        for depth in depths:
            keys = [found.get(bucket.prefix(depth), {})]
            if not depth:
                keys = [names for key, names in found.items() if "/" not in key]
            for names in keys:
                for peer, record in names.items():
                    newest[peer] = max((self._issued(record), depth), newest.get(peer, (0.0, 0)))
        newest.pop(self._me, None)
        return newest


def _bucket_keys(due: Collection[EpochBucket], depths: Mapping[int, Collection[int]]) -> list[str]:
    """Return the keys of the buckets to read at those depths, with the other half of each."""
    keys = []
    for bucket in due:
        keys += [bucket.prefix(depth) for depth in sorted(depths[bucket.epoch]) if depth]
    for bucket in due:
        if bucket.depth + 1 in depths[bucket.epoch]:
            keys.append(bucket.other_half())
    return keys


def _in_trie(prefix: str | None) -> str | None:
    """Return the prefix if it is one of the trie; None if it is of a bucket."""
    return None if prefix is None or "/" in prefix else prefix


def _was_read(bucket: EpochBucket, found: Mapping[str, Names]) -> bool:
    return (bucket.prefix(bucket.depth) if bucket.depth else "") in found


async def is_in_its_bucket(
    get: Get[Mapping[str, bytes]], swarm: str, peer: str, epoch: int
) -> bool:
    """Return whether ``peer`` has a record under any key at which its bucket of ``epoch`` can be,
    or in the trie of all.

    ``get`` returns the records under a key, by peer id. A key that cannot be read counts as one
    without the record.

    Raises NetworkError: no key at all can be read.
    """
    position = bits_in(swarm, epoch, peer)
    path = bits_of(peer)
    prefixes = [bucket_prefix(epoch, position[:depth]) for depth in range(1, MAX_BUCKET_DEPTH + 1)]
    prefixes += [path[:depth] for depth in range(MAX_BUCKET_DEPTH + 1)]
    found = await read_all(lambda prefix: get(key_of(swarm, prefix)), prefixes)
    if not found:
        raise NetworkError("no key of the peer's bucket could be read.")
    for prefix, records in found.items():
        record = open_record(records[peer]) if peer in records else None
        if record is None or record.prefix != prefix:
            continue
        if record.member.peer == peer and record.member.swarm == swarm:
            return True
    return False
