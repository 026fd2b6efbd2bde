"""Membership records in the DHT: their keys, signatures and checks; and epoch buckets, by which a
peer reads few keys of many.

Keys are the nodes of a binary trie over the bits of sha256(peer id): ``{swarm}/m/`` is the root,
``{swarm}/m/01`` the key of all peers whose bits begin with 01. A record names the prefix under
which it is stored, so that the node that stores it can check it.

No key grows with the swarm. A record is stored under the shortest prefix of its peer's bits whose
key holds fewer than ``cap`` others. A reader starts at the root and descends from every key that is
at least a quarter full: a key that was full may have lost peers since, and those below it must not
vanish from view. They move up when it is less than half full, a few at a time.

Buckets. In every epoch (so many seconds of Unix time) all peers are reassigned. A peer's position
is a hash of swarm, epoch and peer id; its bucket are the peers whose position begins with the same
``depth`` bits. It publishes its record under that prefix (``{swarm}/m/7/01`` in epoch 7), reads it,
and is paired in it. At depth 0 there is one bucket, the whole trie above, as in a swarm without
buckets.

Depth. Nobody counts the swarm. A peer takes its bucket's members times 2^depth for the swarm's
size, smoothes that over the epochs, and begins the next one deeper where that lets a bucket hold
more than `FULL` of the most, or less deep where it lets it hold less than `SPARSE`: between the two
is more than a factor of two, so peers near a border stay where they are. In an epoch only a bucket
that is full is split, and one with hardly anybody left looks one level up.

Agreement. Estimates differ by chance, so a peer also reads one level above and below its own, and
all levels on its way down when it is new in an epoch. Of the peers that would be in the deeper of
two buckets, those at either level count each other, and the fewer follow the more (`agreed`). All
of them see the same two keys, so they decide alike; whom a peer is paired with follows from its
depth and all records read, not from the key that a record is under, so they meet at once.

Handover. `LEAD` seconds ahead of an epoch a record is under its keys too, from `LOOK` seconds ahead
these are read and the depths agreed on, and at its first moment all who have read them change over.
Those who have not yet stay until they have. A round that is under way goes on with the partner that
it began with. Peers begin a round seconds apart, so the partner may look elsewhere by then: that is
what a change of buckets costs.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import random
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgpack

from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.identity import Identity
from shoal.swarm.wire.envelope import seal, unseal
from shoal.swarm.wire.messages import Member

if TYPE_CHECKING:
    from hivemind.dht.validation import DHTRecord

N = TypeVar("N")

MAX_DEPTH = 48  # bits of the longest prefix
# Seconds a record may live: hardly more than `Directory` gives it. Of two records of a peer the DHT
# keeps the one that expires later, so an attacker that stored an old one with a longer life would
# keep the newer ones out.
MAX_TTL = 31.0
MAX_RECORD = Member.LIMIT + 512  # bytes
AHEAD = 600.0  # seconds into the future a record may be dated, to be stored at all
MAX_EPOCH = 10**12  # number of an epoch
_PATTERN_BITS = frozenset("01")


class VerifiedRecord(NamedTuple):
    """Membership record whose signature was verified."""

    prefix: str
    member: Member


@functools.lru_cache(maxsize=4096)
def bits_of(peer_id: str) -> str:
    """Return the path of a peer in the trie: `MAX_DEPTH` characters 0 or 1."""
    number = int.from_bytes(hashlib.sha256(peer_id.encode()).digest(), "big")
    return f"{number:0256b}"[:MAX_DEPTH]


@functools.lru_cache(maxsize=32_768)  # asked of every member in view whenever the view is
def bits_in(swarm: str, epoch: int, peer_id: str) -> str:
    """Return the position of a peer in an epoch: `MAX_DEPTH` characters 0 or 1, uniform, and new in
    each epoch.
    """
    number = int.from_bytes(
        hashlib.sha256(f"shoal/bucket/1:{swarm}:{epoch}:{peer_id}".encode()).digest(), "big"
    )
    return f"{number:0256b}"[:MAX_DEPTH]


def bucket_prefix(epoch: int, bits: str) -> str:
    """Return the prefix of the peers whose position in ``epoch`` begins with ``bits``, of which
    there is at least one.
    """
    return f"{epoch}/{bits}"


def _path(prefix: str, swarm: str, peer_id: str) -> str | None:
    """Return the prefix as far as any can go on a peer's way through the trie that ``prefix`` is
    of; None if it is of none.
    """
    epoch, slash, bits = prefix.rpartition("/")
    if len(bits) > MAX_DEPTH or not _PATTERN_BITS.issuperset(bits):
        return None
    if not slash:
        return bits_of(peer_id)
    if not (
        bits
        and epoch.isascii()
        and epoch.isdigit()
        and len(epoch) <= 13
        and epoch == str(int(epoch))
        and int(epoch) < MAX_EPOCH
    ):
        return None
    return bucket_prefix(int(epoch), bits_in(swarm, int(epoch), peer_id))


def key_of(swarm: str, prefix: str) -> str:
    return f"{swarm}/m/{prefix}"


@functools.lru_cache(maxsize=1024)
def _dht_id(swarm: str, prefix: str) -> bytes:
    from hivemind.dht.routing import (
        DHTID,
    )  # seconds of imports, which a node may still be at when it makes its validator

    return bytes(DHTID.generate(source=key_of(swarm, prefix)).to_bytes())


def make_record(prefix: str, member: Member, identity: Identity) -> bytes:
    data: bytes = msgpack.packb([prefix, seal(member, identity)])
    return data


@functools.lru_cache(
    maxsize=4096
)  # each record is seen from several replicas, and several times before it changes
def open_record(data: bytes) -> VerifiedRecord | None:
    """Return the record in ``data``, or None if it is malformed or not signed by the member it
    describes. Never raises.
    """
    try:
        parts = msgpack.unpackb(data, use_list=False, max_ext_len=0, max_map_len=0, max_array_len=2)
        prefix, sealed = parts
        if not isinstance(prefix, str) or not isinstance(sealed, bytes):
            return None
        signer, member = unseal(sealed, Member)
    except (ValueError, TypeError, msgpack.UnpackException, MessageError):
        return None
    path = _path(prefix, member.swarm, signer)
    return (
        VerifiedRecord(prefix, member)
        if signer == member.peer and path is not None and path.startswith(prefix)
        else None
    )


class MemberValidator:
    """Validator that admits to the swarm's DHT only its members' own records, each under its place
    in the trie.

    hivemind drops *all* records of a key when one in an answer is wrong. So every node must come to
    the same result at any time; only the date is compared with this node's clock, with ten minutes
    of tolerance, so that nobody stores records for next year. `Directory` is stricter when it
    reads. hivemind's base class would bring hivemind; it asks a validator for these three methods.
    """

    def __init__(self, swarm: str) -> None:
        self._swarm = swarm

    def sign_value(self, record: DHTRecord) -> bytes:
        return bytes(record.value)

    def strip_value(self, record: DHTRecord) -> bytes:
        return bytes(record.value)

    def validate(self, record: DHTRecord) -> bool:
        """Return whether hivemind may store or return ``record``. Never raises."""
        if len(record.value) > MAX_RECORD + 8:
            return False
        value = _unpacked(record.value, bytes)
        subkey = _unpacked(record.subkey, str)
        found = open_record(value) if value is not None else None
        if found is None:
            return False
        member = found.member
        return (
            member.peer == subkey
            and member.swarm == self._swarm
            and record.key == _dht_id(self._swarm, found.prefix)
            and record.expiration_time <= member.issued + MAX_TTL
            and member.issued <= time.time() + AHEAD
        )


def _unpacked(data: bytes, kind: type) -> Any:
    """Return ``data`` unpacked if it is a msgpack ``kind``, otherwise None."""
    try:
        found = msgpack.unpackb(data, max_ext_len=0, max_map_len=0, max_array_len=0)
    except (ValueError, TypeError, msgpack.UnpackException):
        return None
    return found if isinstance(found, kind) else None


CAP = 32  # records per key, but for a few that raced
# times ``cap`` records of a key are used at most: the first by their bits, whoever is beyond moves
# on by `place`
CROWD = 2
# keys that are read for the sake of known peers, when strangers' records have used up the limit
MAX_KEYS = 128
AT_ONCE = 8  # keys read at a time
# Chance per reading to move up to a half-empty parent: otherwise all below would move there
# together.
RISE = 1 / 8
RISE_HIDDEN = 1 / 2  # the same when the parent holds so few that readers no longer look below it

Names = Mapping[str, object]  # peer id -> its record: the peers under a key
Get = Callable[[str], Awaitable[N]]


async def _read_all(get: Get[N], keys: Iterable[str]) -> dict[str, N]:
    """Return what is under each of ``keys``; one that cannot be read (NetworkError) is left out."""
    keys = tuple(keys)
    found: dict[str, N] = {}
    for key, answer in zip(
        keys, await asyncio.gather(*map(get, keys), return_exceptions=True), strict=True
    ):
        if not isinstance(answer, BaseException):
            found[key] = answer
        elif not isinstance(answer, NetworkError):
            raise answer
    return found


async def read(
    get: Get[Names],
    own: str,
    *,
    now: str | None = None,
    cap: int = CAP,
    limit: int = 1024,
    known: Collection[str] = (),
) -> dict[str, Names]:
    """Return the records under each prefix of the trie, about ``limit`` in all, those near the
    ``own`` bits first.

    The path down to the reader's own prefix ``now`` is read in any case, and for the peers in
    ``known`` up to `MAX_KEYS` keys, so that no number of strangers' records hides them. A key that
    cannot be read is left out, with all below it.

    Raises NetworkError: the root cannot be read.
    """
    found: dict[str, Names] = {"": await get("")}
    total = len(found[""])
    queue = _children("", found[""], own, now or "", cap)
    missing = {peer: bits_of(peer) for peer in known if peer not in found[""]}
    while queue:
        if total >= limit:
            ways = {
                bits[:depth]
                for bits in missing.values()
                for depth in {len(prefix) for prefix in queue}
            }
            queue = [prefix for prefix in queue if prefix in ways] if len(found) < MAX_KEYS else []
        batch = queue[:AT_ONCE]
        queue = queue[AT_ONCE:]
        answers = await _read_all(get, batch)
        found |= answers
        for prefix, names in answers.items():
            for peer in names:
                missing.pop(peer, None)
            total += len(names)
            queue += _children(prefix, names, own, now or "", cap)
    return found


def _has_children(count: int, cap: int) -> bool:
    return count >= max(1, cap // 4)


def _children(prefix: str, names: Names, own: str, now: str, cap: int) -> list[str]:
    on_path = now.startswith(prefix) and len(prefix) < len(now)
    if len(prefix) >= MAX_DEPTH or not (on_path or _has_children(len(names), cap)):
        return []
    return sorted((prefix + "0", prefix + "1"), key=lambda child: not own.startswith(child))


def place(
    me: str,
    now: str | None,
    seen: Mapping[str, Names],
    *,
    cap: int = CAP,
    chance: float | None = None,
) -> str:
    """Return the prefix under which ``me`` should publish, given its prefix ``now`` (None: no
    record yet) and what was read.

    ``chance``: a number in [0, 1) in place of a random one.
    """
    bits = bits_of(me)
    depth = 0
    if now is not None:
        if now not in seen:
            return now
        # More than fit may have raced into one key. All agree which stay: the first by their bits.
        before = sum(bits_of(name) < bits for name in seen[now] if name != me)
        if before < cap:
            parent = now[:-1]
            if now and parent in seen and (above := _others(me, seen[parent])) < max(1, cap // 2):
                dice = random.random() if chance is None else chance
                if dice < (RISE if _has_children(above, cap) else RISE_HIDDEN):
                    return parent
            return now
        depth = len(now) + 1
    while depth < MAX_DEPTH and _others(me, seen.get(bits[:depth], {})) >= cap:
        depth += 1
    return bits[:depth]


def _others(me: str, names: Names) -> int:
    return len(names) - (me in names)


DEEPEST = 12  # bits of a bucket's prefix: 4,096 buckets
FULL, SPARSE = (
    0.75,
    0.3,
    # of the most in a bucket: the mean number in it beyond which the next epoch is deeper, or less
    # deep
)
SMOOTH = 0.25  # weight of an epoch in the estimate of the swarm's size
# Seconds ahead of an epoch at which its keys are written, and read. Two publications, or readings,
# are up to 9 s apart (a directory's period, and most of another when something wakes it), so all
# have published before anybody reads, and read before it begins.
LEAD = 19.0
LOOK = 9.5


@dataclass
class Draw:
    """One peer's bucket of one epoch.

    ``bits``: its position; ``read``: whether the keys on its way were read.
    """

    epoch: int
    bits: str
    depth: int
    read: bool = False
    count: int = 1  # members seen in the bucket, this peer among them, and those that went deeper
    above: int = (
        0  # members of the bucket one level above that are not of this one, and publish there
    )
    # Peers that went one level deeper, into the other half of this bucket.
    elsewhere: frozenset[str] = frozenset()

    def prefix(self, depth: int) -> str:
        """Return the prefix of this peer's bucket at a ``depth`` of at least 1."""
        return bucket_prefix(self.epoch, self.bits[:depth])

    def beside(self) -> str:
        """Return the prefix of the half of this bucket that this peer would not be in."""
        return bucket_prefix(
            self.epoch, self.bits[: self.depth] + ("0" if self.bits[self.depth] == "1" else "1")
        )


def depth_for(size: float, depth: int, most: int) -> int:
    """Return the depth at which to begin an epoch in a swarm of about ``size`` peers, having been
    at ``depth``.
    """
    while depth < DEEPEST and size / 2**depth > (FULL * most if depth else most):
        depth += 1
    while depth and size / 2**depth < SPARSE * most:
        depth -= 1
    return depth


def agreed(
    depth: int,
    bits: str,
    there: Mapping[int, Collection[str]],
    position: Callable[[str], str],
    most: int,
) -> int:
    """Return the depth to be at from now on.

    ``there``: depth -> the other peers whose newest record is under this peer's key at that depth,
    for all depths that were read. ``position``: peer -> its bits in the epoch.
    """
    here = there.get(depth, ())
    few = max(most // 16, 2)
    ways = [position(peer) for peers in there.values() for peer in peers]

    def full(of: int) -> bool:
        """Return whether the bucket at that depth has no room, whichever keys its members are
        under.
        """
        return of > 0 and 1 + sum(way.startswith(bits[:of]) for way in ways) >= most

    for deeper in sorted(other for other in there if other > depth):
        mine = 1 + sum(position(peer).startswith(bits[:deeper]) for peer in here)
        # Far down a handful of forged ids is quickly found, so more than that must be there.
        least = most // 4 if deeper > depth + 1 else max(few - mine, 1)
        if len(there[deeper]) >= max(mine, least):
            return deeper
    crowd = 1 + len(here)
    for higher in sorted((other for other in there if other < depth), reverse=True):
        theirs = sum(position(peer).startswith(bits[:depth]) for peer in there[higher])
        if theirs > 1 + len(here) and not full(higher):
            return higher
        crowd += theirs  # who will follow to here
    if crowd + len(there.get(depth + 1, ())) < few:  # those just below come up as well
        open_to = [
            other for other in there if other > depth + 1 or (other <= depth and not full(other))
        ]
        fullest = max(open_to, key=lambda other: (len(there[other]), -other), default=depth)
        return fullest if len(there.get(fullest, ())) > len(here) else max(depth - 1, 0)
    return depth + 1 if depth < DEEPEST and full(depth) else depth


class Index:
    """The keys that one peer reads and publishes under: of its buckets, or with a ``bucket`` of 0
    of the whole trie.

    ``bucket``: most records in one. ``clock`` returns Unix seconds, ``issued`` when a record was
    made. ``cap`` and ``limit``: of the trie. ``breadth``: a visitor's, who is paired with nobody:
    it sees 2^breadth buckets, its own among them, or all if there are no more. All but `shows`,
    `belongs`, `depth` and `size` run on one loop.
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
        self._breadth = breadth
        self._clock = clock
        self._issued = issued
        self._cap = cap
        self._limit = limit
        self._draws: tuple[Draw, ...] = ()  # the newest that may be in effect first
        self._estimate: float | None = None
        # whether the last reading changed a depth, so that others should know, and the keys there
        # be read
        self.moved = False

    # -- any thread --------------------------------------------------------------------------------

    @property
    def depth(self) -> int:
        """The depth of the bucket in effect; 0: all members."""
        draw = self._current()
        return 0 if draw is None else draw.depth

    def shows(self, peer: str) -> bool:
        """Return whether ``peer``, if it is a member, is in this peer's bucket now, or in one of
        those that a visitor sees.
        """
        draw = self._current()
        if draw is None or not self._top(draw):
            return True
        here = bits_in(self._swarm, draw.epoch, peer).startswith(draw.bits[: self._top(draw)])
        return here and (self._breadth > 0 or peer not in draw.elsewhere)

    def size(self, count: int) -> int:
        """Return about how many members a swarm has of which this peer sees ``count``; the very
        number if it sees all buckets.
        """
        draw = self._current()
        return count if draw is None else count << self._top(draw)

    def changes(self) -> float:
        """Return the Unix second at which the bucket changes next by itself; infinity if that is
        not known.
        """
        draw = self._current()
        return min(
            (
                d.epoch * self._epoch_s
                for d in self._draws
                if d.read and draw and d.epoch > draw.epoch
            ),
            default=float("inf"),
        )

    def _top(self, draw: Draw) -> int:
        """Return the depth of the part of the swarm that this peer sees: its bucket, or for a
        visitor so many levels above it.
        """
        return max(draw.depth - self._breadth, 0)

    def _current(self) -> Draw | None:
        draws = self._draws
        if not draws:
            return None
        now = self._clock()
        ready = (draw for draw in draws if draw.read and draw.epoch * self._epoch_s <= now)
        return next(ready, draws[-1])

    # -- on the loop -------------------------------------------------------------------------------

    def begin(self, size: int) -> None:
        """Begin as a member of a swarm that is known to have ``size`` others."""
        if self._bucket:
            self._estimate = float(size)
            self._turn()

    async def read(
        self, get: Get[Names], *, now: str | None, known: Collection[str] = ()
    ) -> dict[str, Names]:
        """Return the records under each prefix.

        ``now``: where the own record is. Raises NetworkError: the own key is not read.
        """
        if not self._bucket:
            return await self._trie(get, now, known, self._limit)
        self._turn()
        current = self._current()
        wanted = {
            draw.epoch: self._levels(draw)
            for draw in self._draws
            if draw is current or self._due(draw, current, LOOK)
        }
        draws = [draw for draw in self._draws if draw.epoch in wanted]
        keys = [
            draw.prefix(depth) for draw in draws for depth in sorted(wanted[draw.epoch]) if depth
        ]
        keys += [draw.beside() for draw in draws if draw.depth + 1 in wanted[draw.epoch]]
        limit = self._limit if any(draw.depth == 0 for draw in draws) else 2 * self._bucket

        async def trie() -> dict[str, Names]:
            with contextlib.suppress(NetworkError):
                if any(0 in levels for levels in wanted.values()):
                    return await self._trie(get, now, known, limit)
            return {}

        in_trie, in_buckets = await asyncio.gather(trie(), _read_all(get, keys))
        found = in_trie | in_buckets
        self.moved = False
        for draw in draws:
            self._decide(draw, wanted[draw.epoch], found)
        self._forget()
        if current is not None and not self._has(current, found):
            raise NetworkError("the keys of this node's bucket could not be read.")
        if self._breadth and not self.moved and current is not None and current.depth:
            await self._read_around(get, current, found)
        return found

    async def _read_around(self, get: Get[Names], draw: Draw, found: dict[str, Names]) -> None:
        """Read the other buckets of the part that a visitor sees, one level deeper too; keys that
        cannot be read are left out.
        """
        tops = [draw.bits[: self._top(draw)]]
        for _ in range(self._top(draw), draw.depth + 2):
            keys = [bucket_prefix(draw.epoch, bits) for bits in tops if bits]
            keys = [key for key in keys if key not in found]
            for at in range(0, len(keys), AT_ONCE):
                found |= await _read_all(get, keys[at : at + AT_ONCE])
            tops = [bits + bit for bits in tops for bit in "01"]

    def places(
        self, now: str | None, seen: Mapping[str, Names], chance: float | None = None
    ) -> tuple[str, ...]:
        """Return the prefixes to publish under, that of the trie last; ``now``, ``seen``,
        ``chance`` as in `place`.
        """
        current = self._current()
        draws = [draw for draw in self._draws if draw is current or self._due(draw, current, LEAD)]
        deep = [draw.prefix(draw.depth) for draw in draws if draw.depth]
        if draws and len(deep) == len(draws):
            return tuple(deep)
        in_trie = None if now is None or "/" in now else now
        return (*deep, place(self._me, in_trie, seen, cap=self._cap, chance=chance))

    def _trie(
        self, get: Get[Names], now: str | None, known: Collection[str], limit: int
    ) -> Awaitable[dict[str, Names]]:
        in_trie = None if now is None or "/" in now else now
        return read(get, bits_of(self._me), now=in_trie, cap=self._cap, limit=limit, known=known)

    def _due(self, draw: Draw, current: Draw | None, ahead: float) -> bool:
        return (
            current is not None
            and draw.epoch > current.epoch
            and draw.epoch * self._epoch_s - self._clock() <= ahead
        )

    def _turn(self) -> None:
        """Draw the bucket of this epoch, and that of the next one shortly ahead of it."""
        now = self._clock()
        current = self._current()
        for epoch in dict.fromkeys((int(now / self._epoch_s), int((now + LEAD) / self._epoch_s))):
            if all(draw.epoch != epoch for draw in self._draws):
                if current is not None and current.read:
                    self._learn(current)
                depth = 0 if current is None else current.depth
                if self._estimate is not None:
                    depth = depth_for(self._estimate, depth, self._bucket)
                new = Draw(epoch, bits_in(self._swarm, epoch, self._me), depth)
                self._draws = tuple(sorted((new, *self._draws), key=lambda draw: -draw.epoch))

    def _learn(self, draw: Draw) -> None:
        """Take what an epoch showed into the estimate of the swarm's size."""
        # Where the other half of the swarm has come up, both are counted, in place of twice this
        # one. Deeper down, or by a few that came up, it would make parts that just met take the
        # swarm for small.
        up = draw.depth == 1 and 4 * draw.above >= draw.count
        size = float(draw.count + draw.above if up else draw.count << draw.depth)
        before = self._estimate
        # At depth 0 it is no estimate, and far from the last one it is no chance.
        new = before is None or not draw.depth or not before / 2 <= size <= 2 * before
        self._estimate = size if new or before is None else before + SMOOTH * (size - before)

    def _forget(self) -> None:
        """Drop the epochs that are over, and with a clock that was set back those that are not
        begun.
        """
        current = self._current()
        now = self._clock()
        soon = int((now + LEAD) / self._epoch_s)
        self._draws = tuple(
            draw
            for draw in self._draws
            if draw is current or int(now / self._epoch_s) <= draw.epoch <= soon
        )

    def _levels(self, draw: Draw) -> set[int]:
        """Return the depths whose keys are read: all on the way while a bucket is new, then its own
        and those beside it.
        """
        if not draw.read:
            return set(range(DEEPEST + 1))
        beside = {draw.depth - 1, draw.depth, draw.depth + 1} & set(range(DEEPEST + 1))
        return beside if draw.depth or 2 * draw.count > self._bucket else {0}

    def _has(self, draw: Draw, found: Mapping[str, Names]) -> bool:
        return (draw.prefix(draw.depth) if draw.depth else "") in found

    def _decide(self, draw: Draw, levels: Collection[int], found: Mapping[str, Names]) -> None:
        """Agree on the depth by what was read, and count the members."""
        if not self._has(draw, found):
            return
        newest: dict[str, tuple[float, int]] = {}
        for depth in levels:
            under = (
                [found.get(draw.prefix(depth), {})]
                if depth
                else [names for key, names in found.items() if "/" not in key]
            )
            for names in under:
                for peer, record in names.items():
                    newest[peer] = max((self._issued(record), depth), newest.get(peer, (0.0, 0)))
        newest.pop(self._me, None)
        beside = found.get(draw.beside(), {})
        gone = {
            peer
            for peer, record in beside.items()
            if self._issued(record) >= newest.get(peer, (0.0, 0))[0]
        }
        newest = {peer: at for peer, at in newest.items() if peer not in gone}
        there: dict[int, list[str]] = {depth: [] for depth in levels}
        for peer, (_, depth) in newest.items():
            there[depth].append(peer)

        def position(peer: str) -> str:
            return bits_in(self._swarm, draw.epoch, peer)

        depth = agreed(draw.depth, draw.bits, there, position, self._bucket)
        draw.read = True
        self.moved = self.moved or depth != draw.depth
        draw.elsewhere = frozenset(gone) if depth == draw.depth else frozenset()
        draw.depth = depth
        # With those who went deeper: without them the others would take the swarm for smaller than
        # it is, and never follow.
        draw.count = 1 + sum(
            position(peer).startswith(draw.bits[:depth]) for peer in gone.union(newest)
        )
        draw.above = sum(
            not position(peer).startswith(draw.bits[:depth]) for peer in there.get(depth - 1, ())
        )


async def is_in_its_bucket(
    get: Get[Mapping[str, bytes]], swarm: str, peer: str, epoch: int
) -> bool:
    """Return whether ``peer`` has a record under any key at which its bucket of ``epoch`` can be,
    or in the trie of all.

    ``get`` returns the records under a key, by peer id. A key that cannot be read counts as one
    without the record.

    Raises NetworkError: no key at all can be read.
    """
    own = bits_in(swarm, epoch, peer)
    trie = bits_of(peer)
    prefixes = [bucket_prefix(epoch, own[:depth]) for depth in range(1, DEEPEST + 1)]
    prefixes += [trie[:depth] for depth in range(DEEPEST + 1)]
    found = await _read_all(lambda prefix: get(key_of(swarm, prefix)), prefixes)
    if not found:
        raise NetworkError("no key of the peer's bucket could be read.")
    for prefix, records in found.items():
        record = open_record(records[peer]) if peer in records else None
        if (
            record is not None
            and record.prefix == prefix
            and record.member.peer == peer
            and record.member.swarm == swarm
        ):
            return True
    return False
