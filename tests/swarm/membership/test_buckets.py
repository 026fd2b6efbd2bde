"""Epoch buckets: positions, the depth of a bucket and how peers agree on it, the keys that are read
and written, the search for one peer's record, and a directory's view."""

import asyncio
import math
import time
from collections import Counter
from types import SimpleNamespace

import msgpack
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shoal.swarm.errors import NetworkError
from shoal.swarm.identity import Identity
from shoal.swarm.membership import trie
from shoal.swarm.membership.bucket_depth import (
    DEEPEN_SHARE,
    MAX_BUCKET_DEPTH,
    MERGE_SHARE,
    agreed,
    depth_for,
)
from shoal.swarm.membership.bucket_index import (
    PUBLISH_AHEAD_S,
    READ_AHEAD_S,
    Index,
    is_in_its_bucket,
)
from shoal.swarm.membership.directory import Directory
from shoal.swarm.membership.records import (
    bits_in,
    bits_of,
    bucket_prefix,
    key_of,
    make_record,
    open_record,
)
from tests.support.directory_hosts import Shelf
from tests.support.records import ABOUT, member_of

SWARM = "a" * 52
ME = Identity.ephemeral()


def record(prefix, identity=ME, swarm=SWARM, issued=1e9):
    return make_record(prefix, member_of(identity.peer_id, swarm=swarm, issued=issued), identity)


# -- positions -------------------------------------------------------------------------------------


def test_positions_are_even_and_new_in_each_epoch_and_swarm():
    peers = [f"peer{number}" for number in range(4096)]
    counts = Counter(bits_in(SWARM, 7, peer)[:4] for peer in peers)
    assert len(counts) == 16
    assert max(counts.values()) < 256 + 5 * 16  # five deviations
    again = sum(bits_in(SWARM, 7, peer)[:4] == bits_in(SWARM, 8, peer)[:4] for peer in peers)
    assert abs(again - 256) < 5 * 16
    assert bits_in(SWARM, 7, "peer0") != bits_in("b" * 52, 7, "peer0")
    # of the documentation of the wire: the first bits of SHA-256 of this text
    assert bits_in("s", 1, "p") == "101111110111001010000010110010110101100110001111"


def test_record_counts_on_its_own_path_only():
    """A record is believed under its own way of the epoch alone."""
    own = bits_in(SWARM, 12, ME.peer_id)
    right = bucket_prefix(12, own[:5])
    assert open_record(record(right)).prefix == right == f"12/{own[:5]}"
    other = own[:4] + ("0" if own[4] == "1" else "1")
    wrong = [
        f"12/{other}",
        f"13/{own}",
        f"012/{own[:5]}",
        f"-12/{own[:5]}",
        f"1²/{own[:5]}",
        f"12/{own}0",
        "12/",
        "/0",
        "12/2",
    ]
    wrong += [
        f"12/12/{own[:5]}",
        f" 12/{own[:5]}",
        f"{10**12}/{bits_in(SWARM, 10**12, ME.peer_id)[:5]}",
        "9" * 999 + "/0",
    ]
    assert [open_record(record(prefix)) for prefix in wrong] == [None] * len(wrong)
    assert (
        open_record(record(f"12/{own[:8]}", swarm="b" * 52)) is None
    )  # there its position is another
    assert open_record(msgpack.packb([12, b""])) is None
    trie = bits_of(ME.peer_id)[:3]
    assert open_record(record(trie)).prefix == trie


# -- depth -----------------------------------------------------------------------------------------


@given(st.integers(1, 150_000), st.integers(0, MAX_BUCKET_DEPTH), st.integers(4, 64))
def test_an_epoch_begins_at_a_depth_that_fits_and_stays(size, depth, most):
    found = depth_for(size, depth, most)
    assert depth_for(size, found, most) == found
    if 0 < found < MAX_BUCKET_DEPTH:
        assert MERGE_SHARE * most <= size / 2**found <= DEEPEN_SHARE * most or found == 1
    if found == 0:
        assert size <= most


@given(st.integers(4, 64), st.integers(1, 8), st.floats(0.82, 1.0))
def test_peers_near_a_border_stay_where_they_are(most, depth, low):
    """Whoever went deeper at an estimate does not come back at one that is a fifth lower, nor the
    other way round.
    """
    size = DEEPEN_SHARE * most * 2**depth * 1.001
    deeper = depth_for(size, depth, most)
    assert deeper == depth + 1
    assert depth_for(size * low, deeper, most) == deeper
    size = MERGE_SHARE * most * 2 ** (depth + 1) * 0.999
    higher = depth_for(size, depth + 1, most)
    assert higher <= depth
    assert higher == 0 or depth_for(size / low, higher, most) == higher


def test_a_swarm_of_one_bucket_is_not_split():
    assert [depth_for(size, 0, 64) for size in (1, 64, 65, 256, 1000, 4000, 10_000)] == [
        0,
        0,
        1,
        3,
        5,
        7,
        8,
    ]


def peers_of(*prefixes):
    """Return for each prefix a made-up peer whose position begins so, and the function that tells
    it.
    """
    where = {f"{number} {prefix}": prefix.ljust(48, "0") for number, prefix in enumerate(prefixes)}
    return list(where), where.__getitem__


@given(st.integers(1, 22), st.integers(1, 22), st.integers(0, 15), st.integers(0, 9))
def test_peers_that_disagree_by_one_agree_at_the_first_reading(above, below, beside, depth):
    """``above`` and ``below`` are at both levels and would share the deeper bucket; ``beside`` are
    in the other half.
    """
    assume(above + below >= 4)
    way = "01" * 5
    names, position = peers_of(
        *[way[: depth + 1]] * (above + below),
        *[way[:depth] + ("1" if depth % 2 == 0 else "0")] * beside,
    )
    higher, deeper, others = names[:above], names[above : above + below], names[above + below :]
    found = set()
    for peer in (*higher, *deeper):
        there = {
            depth: [other for other in (*higher, *others) if other != peer],
            depth + 1: [other for other in deeper if other != peer],
        }
        found.add(
            agreed(depth if peer in higher else depth + 1, way.ljust(48, "0"), there, position, 64)
        )
    assert found == {depth + 1 if below >= above else depth}


def test_full_bucket_is_split_by_all():
    """A full bucket is split by all and nobody returns into it."""
    names, position = peers_of(*["00"] * 8, *["01"] * 8)
    bits = "00".ljust(48, "0")
    assert agreed(1, bits, {0: [], 1: names[:14], 2: []}, position, 16) == 1  # fifteen
    assert agreed(1, bits, {0: [], 1: names[:15], 2: []}, position, 16) == 2
    # One has gone first: the others are still under the old key, and so is what the other half
    # wrote.
    assert agreed(2, bits, {1: names[:15], 2: [], 3: []}, position, 16) == 2
    assert agreed(1, bits, {0: [], 1: names[3:15], 2: names[:3]}, position, 16) == 2


def test_sparse_bucket_looks_one_level_up():
    """A bucket of hardly anybody looks one level up and a newcomer goes where the others are."""
    names, position = peers_of(*["0110"] * 30)
    bits = "0110".ljust(48, "0")
    assert agreed(4, bits, {3: [], 4: names[:2], 5: []}, position, 64) == 3
    assert agreed(4, bits, {3: [], 4: names[:3], 5: []}, position, 64) == 4
    nobody = {depth: [] for depth in range(MAX_BUCKET_DEPTH + 1)}
    assert agreed(0, bits, nobody, position, 64) == 0
    assert agreed(0, bits, {**nobody, 4: names[:5]}, position, 64) == 4
    assert agreed(9, bits, {**nobody, 4: names[:5]}, position, 64) == 4


def test_a_few_forged_records_far_down_lure_nobody():
    names, position = peers_of(*["0"] * 20, *["0" * 12] * 16)
    bits = "0".ljust(48, "1")
    assert agreed(1, bits, {1: names[:20], 12: names[20:35]}, position, 64) == 1
    assert (
        agreed(1, bits, {1: names[:20], 12: names[20:]}, position, 64) == 12
    )  # a quarter of a bucket is a swarm


# -- the keys --------------------------------------------------------------------------------------


class Table:
    """Keys, and the clock of the peers that read them."""

    def __init__(self, now=1e9):
        self.keys, self.now, self.asked, self.broken = {}, now, [], set()

    def index(self, peer, **options):
        return Index(
            SWARM,
            peer,
            clock=lambda: self.now,
            issued=lambda at: at,
            **{"bucket": 16, "epoch_s": 60.0, "limit": 1024, **options},
        )

    async def get(self, prefix):
        self.asked.append(prefix)
        if prefix in self.broken:
            raise NetworkError("gone")
        return dict(self.keys.get(prefix, {}))

    def read(self, index, now=None):
        self.asked = []
        return asyncio.run(index.read(self.get, now=now))

    def fill(self, epoch, depth, count):
        for number in range(count):
            bits = bits_in(SWARM, epoch, f"peer{number}")
            self.keys.setdefault(bucket_prefix(epoch, bits[:depth]) if depth else "", {})[
                f"peer{number}"
            ] = self.now


EPOCH = int(1e9 // 60)  # of which 20 seconds are over at 1e9
SIXTY = [f"peer{number}" for number in range(60)]


def sixty(bucket=32, size=None):
    """Return a table of sixty peers at depth 3, and the index of another that has read it."""
    table = Table()
    table.fill(EPOCH, 3, 60)
    index = table.index("me", bucket=bucket)
    if size is not None:
        index.begin(size)
    table.read(index)
    return table, index


def test_without_buckets_the_whole_trie_is_read_and_written():
    table = Table()
    table.keys = {"": {f"peer{number}": 1.0 for number in range(40)}}
    index, plain = table.index("me", bucket=0), Table()
    plain.keys = table.keys
    expected = asyncio.run(trie.read(plain.get, bits_of("me"), now=None))
    assert table.read(index) == expected
    assert table.asked == plain.asked
    assert index.places(None, expected, 0.5) == (trie.place("me", None, expected, chance=0.5),)
    assert (index.depth, index.size(41), index.shows("peer1")) == (0, 41, True)


def test_one_bucket_is_as_without():
    """A swarm of one bucket is written and seen as without."""
    table = Table()
    table.keys = {"": {f"peer{number}": table.now for number in range(7)}}
    index = table.index("me")
    found = table.read(index)
    ways = {bucket_prefix(EPOCH, bits_in(SWARM, EPOCH, "me")[:depth]) for depth in range(1, 13)}
    assert set(table.asked) == {"", f"{EPOCH}/0", f"{EPOCH}/1"} | ways
    assert index.places("", found) == ("",)
    table.now += 5
    table.read(index, "")
    assert table.asked == [""]
    assert index.depth == 0
    assert all(index.shows(peer) for peer in table.keys[""])


def test_a_newcomer_finds_its_bucket_and_then_reads_four_keys():
    table = Table()
    table.fill(EPOCH, 4, 160)
    index = table.index("me")
    own = bits_in(SWARM, EPOCH, "me")
    table.read(index)
    assert index.depth == 4
    assert index.moved  # so others should know
    assert index.places(None, {}) == (bucket_prefix(EPOCH, own[:4]),)
    peers = [f"peer{number}" for number in range(160)]
    seen = [peer for peer in peers if index.shows(peer)]
    assert seen == [peer for peer in peers if bits_in(SWARM, EPOCH, peer)[:4] == own[:4]]
    assert 4 <= len(seen) <= 20
    assert index.size(len(seen) + 1) == 16 * (len(seen) + 1)
    table.read(index, bucket_prefix(EPOCH, own[:4]))
    other = own[:4] + ("0" if own[4] == "1" else "1")
    assert table.asked == [
        bucket_prefix(EPOCH, bits) for bits in (own[:3], own[:4], own[:5], other)
    ]
    assert not index.moved


def test_deeper_other_half_is_not_in_view():
    """They do not see this peer any more; their records under the old key are only not yet
    expired.
    """
    table, index = sixty()
    own = bits_in(SWARM, EPOCH, "me")
    other = own[:3] + ("0" if own[3] == "1" else "1")
    gone = [peer for peer in SIXTY if bits_in(SWARM, EPOCH, peer).startswith(other)]
    assert gone
    assert all(index.shows(peer) for peer in gone)
    table.keys[bucket_prefix(EPOCH, other)] = dict.fromkeys(gone, table.now + 1)
    table.read(index)
    assert index.depth == 3
    assert not any(index.shows(peer) for peer in gone)
    table.keys[bucket_prefix(EPOCH, own[:3])] |= dict.fromkeys(gone, table.now + 2)  # and came back
    table.read(index)
    assert all(index.shows(peer) for peer in gone)


def test_next_epoch_is_written_and_read_ahead():
    """The next epoch is written and read ahead and begins at its moment."""
    table, index = sixty()
    old, new = bits_in(SWARM, EPOCH, "me")[:3], bits_in(SWARM, EPOCH + 1, "me")[:3]
    begins = (EPOCH + 1) * 60.0
    table.now = begins - PUBLISH_AHEAD_S - 0.1
    table.fill(EPOCH, 3, 60)
    table.read(index)
    assert index.places(None, {}) == (bucket_prefix(EPOCH, old),)
    table.now = begins - PUBLISH_AHEAD_S + 0.1
    table.read(index)
    assert set(index.places(None, {})) == {bucket_prefix(EPOCH, old), bucket_prefix(EPOCH + 1, new)}
    assert bucket_prefix(EPOCH + 1, new) not in table.asked
    assert index.changes() == float("inf")
    table.fill(EPOCH + 1, 3, 60)
    table.now = begins - READ_AHEAD_S + 0.1
    table.read(index)
    assert bucket_prefix(EPOCH + 1, new) in table.asked
    assert index.changes() == begins
    table.now = begins - 0.01
    assert index.shows("peer1") == bits_in(SWARM, EPOCH, "peer1").startswith(old)
    table.now = begins
    assert [peer for peer in SIXTY if index.shows(peer)] == [
        p for p in SIXTY if bits_in(SWARM, EPOCH + 1, p).startswith(new)
    ]
    assert index.places(None, {}) == (bucket_prefix(EPOCH + 1, new),)


def test_unread_next_bucket_keeps_the_present_one():
    """Who could not read the next bucket stays in its own."""
    table, index = sixty()
    old, new = (bits_in(SWARM, epoch, "me")[:3] for epoch in (EPOCH, EPOCH + 1))
    table.now = (EPOCH + 1) * 60.0 + 5.0
    table.broken.add(bucket_prefix(EPOCH + 1, new))
    table.read(index)
    assert index.shows("peer1") == bits_in(SWARM, EPOCH, "peer1").startswith(old)
    assert set(index.places(None, {})) == {bucket_prefix(EPOCH, old), bucket_prefix(EPOCH + 1, new)}
    table.broken.clear()
    table.fill(EPOCH + 1, 3, 60)
    table.read(index)
    assert index.places(None, {}) == (bucket_prefix(EPOCH + 1, new),)


def test_unreadable_own_key_is_an_error():
    """A key of one's own that cannot be read is an error."""
    table, index = sixty(bucket=16)
    table.broken.add(bucket_prefix(EPOCH, bits_in(SWARM, EPOCH, "me")[:3]))
    with pytest.raises(NetworkError):
        table.read(index)


def test_the_estimate_is_smoothed_but_for_a_great_change():
    _, index = sixty(bucket=64, size=90)
    draw = index._epochs[0]
    draw.read, draw.depth = True, 3
    for count, expected in (
        (10, 80.0),
        (14, 88.0),
        (2, 16.0),
    ):  # of 8 buckets: the first counts half, then a quarter of the change
        draw.count = count
        index._estimate = 80.0
        index._update_estimate(draw)
        assert index._estimate == pytest.approx(expected)


# -- visitors --------------------------------------------------------------------------------------


def test_visitor_estimates_by_eight_buckets():
    """A visitor counts the members of eight buckets and is nearer to the truth than by one."""
    table, peers = Table(), 1500
    table.fill(EPOCH, 5, peers)
    errors = {}
    for breadth in (0, 3):
        estimates = []
        for number in range(24):
            index = table.index(f"visitor{number}", bucket=64, breadth=breadth)
            table.read(index)
            assert index.moved
            found = table.read(index)
            seen = {peer for names in found.values() for peer in names if index.shows(peer)}
            estimates.append(index.size(len(seen)) / peers - 1)
        errors[breadth] = math.sqrt(sum(error**2 for error in estimates) / len(estimates))
    assert errors[3] < 0.1 < errors[0]
    assert len(table.asked) == len(set(table.asked)) < 40, (
        "31 keys at most, and the level above its bucket's way"
    )


def test_visitor_sees_all_of_a_few_buckets():
    """A visitor sees all of a swarm of a few buckets whatever level they are at."""
    table, peers = Table(), 60
    for number in range(peers):
        bits = bits_in(SWARM, EPOCH, f"peer{number}")
        table.keys.setdefault(bucket_prefix(EPOCH, bits[: 3 if bits[0] == "0" else 2]), {})[
            f"peer{number}"
        ] = table.now
    west = next(
        f"visitor{number}"
        for number in range(99)
        if bits_in(SWARM, EPOCH, f"visitor{number}")[0] == "0"
    )
    for visitor, broken in (
        ("visitor0", ""),
        ("visitor1", ""),
        (west, ""),
        (west, bucket_prefix(EPOCH, "11")),
    ):
        index = table.index(visitor, breadth=3)
        table.read(index)
        table.broken = {broken}
        found = table.read(index)
        seen = {peer for names in found.values() for peer in names if index.shows(peer)}
        assert len(seen) == index.size(len(seen)) == peers - len(table.keys.get(broken, ()))
        table.broken = set()


# -- the search for one peer's record --------------------------------------------------------------

TURN = 7
OWN = bits_in(SWARM, TURN, ME.peer_id)


def stored(prefix, key=None):
    return {key_of(SWARM, prefix if key is None else key): {ME.peer_id: record(prefix)}}


def searched(keys, broken=()):
    async def get(key):
        if key in broken:
            raise NetworkError("gone")
        return keys.get(key, {})

    return asyncio.run(is_in_its_bucket(get, SWARM, ME.peer_id, TURN))


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        bits_of(ME.peer_id)[:3],
        bucket_prefix(TURN, OWN[:1]),
        bucket_prefix(TURN, OWN[:MAX_BUCKET_DEPTH]),
    ],
    ids=["everyone", "another", "one bit", "deepest"],
)
def test_a_record_is_found_at_any_depth(prefix):
    assert searched(stored(prefix))


def test_record_of_another_epoch_does_not_count():
    """A record of another epoch or under another key does not count."""
    assert not searched({})
    other = TURN + 1
    assert not searched(stored(bucket_prefix(other, bits_in(SWARM, other, ME.peer_id)[:2])))
    assert not searched(stored(bucket_prefix(TURN, OWN[:2]), key=bucket_prefix(TURN, OWN[:3])))
    assert not searched({key_of(SWARM, ""): {ME.peer_id: b"junk"}})


def test_unreadable_keys_are_skipped_unless_all():
    """Keys that cannot be read are passed over unless they are all."""
    keys = stored(bucket_prefix(TURN, OWN[:2]))
    assert searched(keys, broken={key_of(SWARM, "")})
    every = {
        key_of(SWARM, bucket_prefix(TURN, OWN[:depth])) for depth in range(1, MAX_BUCKET_DEPTH + 1)
    }
    every |= {key_of(SWARM, bits_of(ME.peer_id)[:depth]) for depth in range(MAX_BUCKET_DEPTH + 1)}
    with pytest.raises(NetworkError):
        searched({}, broken=every)


# -- the directory of a swarm of buckets -----------------------------------------------------------

HOUR = 3600.0


def test_members_are_the_buckets_and_others_reachable():
    """Members are those of the bucket and others can still be reached."""
    shelf, epoch, me = Shelf(), int((time.time() + 60) // HOUR), Identity.ephemeral()
    own = bits_in(SWARM, epoch, me.peer_id)[:2]
    skew = (
        epoch * HOUR + 100.0 - time.time()
    )  # by the clock of the others the epoch has begun a moment ago
    there = []
    for _ in range(40):
        peer = Identity.ephemeral()
        prefix = bucket_prefix(epoch, bits_in(SWARM, epoch, peer.peer_id)[:2])
        shelf.keys[key_of(SWARM, prefix)][peer.peer_id] = record(
            prefix, peer, issued=time.time() + skew
        )
        there += [peer.peer_id] * prefix.endswith(f"/{own}")
    directory = Directory(shelf, me, SWARM, bucket=32, epoch_s=HOUR)
    directory.skew = skew
    directory.announce(**ABOUT)
    directory.refresh(5)
    assert set(directory.members()) == {me.peer_id, *there}
    assert directory.size() == 4 * (len(there) + 1)
    assert directory.wait_for(directory.size(), 0.0)
    assert all(directory.belongs(peer) for peer in there)
    assert directory.leave(5)
    assert me.peer_id in shelf.keys[key_of(SWARM, bucket_prefix(epoch, own))]


def test_former_bucket_members_stay_reachable():
    """Who was in the bucket just before can still be reached."""
    shelf, me, peer = Shelf(), Identity.ephemeral(), Identity.ephemeral()
    directory = Directory(shelf, me, SWARM, bucket=32, epoch_s=HOUR)
    assert directory.hear(member_of(peer.peer_id, issued=time.time()))
    directory._index.shows = lambda peer: False
    assert not directory.members()
    assert not directory.departed()
    assert not directory.belongs(peer.peer_id)
    assert set(directory.everyone()) == {peer.peer_id}
    assert directory.knows(peer.peer_id)


def test_wrong_clock_still_joins_the_epoch(
    monkeypatch,
):
    """A node whose clock is minutes off is in the epoch of the others and is believed by them."""
    shelf, me, peer, now = Shelf(), Identity.ephemeral(), Identity.ephemeral(), 1e9
    monkeypatch.setattr(
        "shoal.swarm.membership.directory.time",
        SimpleNamespace(time=lambda: now - 125.0, monotonic=time.monotonic),
    )
    wrong = Directory(shelf, me, SWARM, bucket=4, epoch_s=30.0)
    wrong._index.begin(64)
    wrong.announce(**ABOUT)
    wrong.skew = 125.0
    wrong.refresh(5)
    asyncio.run(wrong._publish())
    (prefix,) = [
        key.rpartition("/m/")[2] for key, records in shelf.keys.items() if me.peer_id in records
    ]
    assert prefix.startswith(f"{int(now // 30.0)}/") or not prefix
    assert wrong._index._current().epoch == int(now // 30.0)
    assert wrong.own().issued == now
    # What others date a moment ago is fresh, and not of the future.
    theirs = member_of(peer.peer_id, issued=now - 1.0)
    assert wrong.hear(theirs)
    assert peer.peer_id in wrong.everyone()


def test_visitor_reads_again_beside_its_bucket():
    """A visitor reads again once it knows where its bucket is and sees the ones beside."""
    shelf, epoch = Shelf(), int(time.time() // HOUR)
    directory = Directory(shelf, Identity.ephemeral(), SWARM, bucket=16, epoch_s=HOUR, breadth=3)
    for _ in range(40):
        peer = Identity.ephemeral()
        for at in (epoch, epoch + 1):  # in case an hour ends here
            prefix = bucket_prefix(at, bits_in(SWARM, at, peer.peer_id)[:2])
            shelf.keys[key_of(SWARM, prefix)][peer.peer_id] = record(
                prefix, peer, issued=time.time()
            )
    directory.refresh(5)
    assert len(directory.members()) == directory.size() == 40
