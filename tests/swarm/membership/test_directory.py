"""The directory: real hosts that see each other, records that are refused, a trie in memory with a
thousand peers; and reading and publishing, which do not wait for each other."""

import asyncio
import random
import time
from types import SimpleNamespace

import msgpack
import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord

from shoal.swarm.errors import NetworkError
from shoal.swarm.identity import Identity
from shoal.swarm.membership import directory_loops, trie
from shoal.swarm.membership.directory import Directory
from shoal.swarm.membership.own_record import OwnRecord
from shoal.swarm.membership.records import (
    DATED_AHEAD_S,
    MAX_TTL_S,
    MemberValidator,
    bits_of,
    key_of,
    make_record,
    open_record,
)
from shoal.swarm.wire.envelope import seal, unseal
from shoal.swarm.wire.messages import Member
from tests.support.directory_hosts import Node, Quiet
from tests.support.directory_hosts import Shelf as Table
from tests.support.loop_thread import LoopThread
from tests.support.records import ABOUT, member_of
from tests.support.waiting import until

SWARM = "a" * 52


# -- the trie, in memory ---------------------------------------------------------------------------


class Shelf:
    """A DHT in memory: prefix -> peers; every peer's older record is dropped, as it would
    expire.
    """

    def __init__(self):
        self.keys = {}
        self.reads = 0

    async def get(self, prefix):
        self.reads += 1
        return dict(self.keys.get(prefix, {}))

    def put(self, prefix, peer):
        for names in self.keys.values():
            names.pop(peer, None)
        self.keys.setdefault(prefix, {})[peer] = True

    def where(self, peer):
        return next((prefix for prefix, names in self.keys.items() if peer in names), None)

    def look(self, peer, **options):
        return asyncio.run(trie.read(self.get, bits_of(peer), **options))

    def settle(self, peer, cap, chance=0.99):
        seen = self.look(peer, now=self.where(peer), cap=cap, limit=10**6)
        self.put(trie.place(peer, self.where(peer), seen, cap=cap, chance=chance), peer)


@pytest.mark.parametrize(("count", "cap"), [(1, 2), (3, 2), (40, 2), (1000, 32)])
def test_no_key_exceeds_cap_and_every_reader_sees_all(count, cap):
    shelf, peers = Shelf(), [f"peer{i}" for i in range(count)]
    for peer in peers:
        shelf.settle(peer, cap)
    assert max(map(len, shelf.keys.values())) <= cap
    assert {
        prefix
        for prefix in shelf.keys
        if not bits_of(next(iter(shelf.keys[prefix]), "")).startswith(prefix)
    } <= {prefix for prefix, names in shelf.keys.items() if not names}
    shelf.reads = 0
    seen = shelf.look(peers[0], cap=cap, limit=10**6)
    assert {peer for names in seen.values() for peer in names} == set(peers)
    assert shelf.reads <= 8 * count / cap + 3


def test_all_that_raced_into_one_key_but_cap_move_on():
    shelf, peers, cap = Shelf(), [f"peer{i}" for i in range(100)], 4
    for peer in peers:
        shelf.put("", peer)
    for _ in range(10):
        for peer in peers:
            shelf.settle(peer, cap)
    assert max(map(len, shelf.keys.values())) <= cap
    assert {p for names in shelf.look("x", cap=cap, limit=10**6).values() for p in names} == set(
        peers
    )


def test_peers_below_an_emptied_key_move_up():
    """Peers below a key that empties stay in view and move up."""
    shelf, peers, cap = Shelf(), [f"peer{i}" for i in range(30)], 8
    for peer in peers:
        shelf.settle(peer, cap)
    first = list(shelf.keys[""])
    assert len(first) == cap

    def lose(how_many):
        for peer in first[:how_many]:
            del shelf.keys[""][peer]
            peers.remove(peer)
        del first[:how_many]

    def in_view():
        return {p for names in shelf.look("x", cap=cap).values() for p in names}

    lose(5)  # less than half is left, but more than a quarter
    assert in_view() == set(peers)
    below = next(
        iter(next(names for prefix, names in shelf.keys.items() if len(prefix) == 1 and names))
    )
    shelf.settle(below, cap, chance=trie.RISE_CHANCE)
    assert len(shelf.where(below)) == 1  # not all at once
    lose(2)
    assert in_view() == set(first)
    shelf.settle(below, cap, chance=trie.RISE_CHANCE)
    assert shelf.where(below) == ""  # now it is urgent
    assert in_view() == set(peers)


def test_a_reader_is_bounded():
    shelf = Shelf()
    for i in range(500):
        shelf.settle(f"peer{i}", 4)
    seen = shelf.look("peer0", cap=4, limit=100)
    assert 100 <= sum(map(len, seen.values())) < 100 + 4 * trie.KEYS_AT_ONCE
    assert shelf.where("peer0") in seen  # the own place is always looked at first


def test_unreadable_key_hides_only_what_is_below():
    """A key that cannot be read hides only what is below."""
    shelf = Shelf()
    for i in range(40):
        shelf.settle(f"peer{i}", 2)

    async def get(prefix):
        if prefix == "0":
            raise NetworkError("no answer")
        return await shelf.get(prefix)

    seen = asyncio.run(trie.read(get, "1" * 48, cap=2))
    assert "1" in seen
    assert not any(prefix.startswith("0") for prefix in seen)

    async def nothing(prefix):
        raise NetworkError("no answer")

    with pytest.raises(NetworkError):
        asyncio.run(trie.read(nothing, "1" * 48))


def test_a_peer_whose_key_was_not_read_stays():
    assert trie.place("peer", "0101", {"": {}}, cap=2) == "0101"


# -- records ---------------------------------------------------------------------------------------


@pytest.fixture
def me():
    return Identity.ephemeral()


def member(identity, **changes):
    return member_of(identity.peer_id, **{"issued": time.time(), **changes})


def dht_record(value, subkey, prefix="", swarm=SWARM, expires_in=30.0):
    return DHTRecord(
        key=DHTID.generate(source=key_of(swarm, prefix)).to_bytes(),
        subkey=DHTProtocol.serializer.dumps(subkey),
        value=DHTProtocol.serializer.dumps(value),
        expiration_time=time.time() + expires_in,
    )


def accepted(record):
    return MemberValidator(SWARM).validate(record)


def test_an_honest_record_is_accepted_at_each_of_its_places(me):
    for depth in (0, 1, 5):
        prefix = bits_of(me.peer_id)[:depth]
        assert accepted(dht_record(make_record(prefix, member(me), me), me.peer_id, prefix))


def test_forged_and_misplaced_records_are_refused(me):
    other = Identity.ephemeral()
    bits = bits_of(me.peer_id)
    wrong = ("1" if bits[0] == "0" else "0") + bits[1:]
    good = make_record("", member(me), me)
    flipped = good[:-1] + bytes([good[-1] ^ 1])
    refused = {
        "signed by another": dht_record(make_record("", member(me), other), me.peer_id),
        "in another's name": dht_record(good, other.peer_id),
        "damaged": dht_record(flipped, me.peer_id),
        "of another swarm": dht_record(make_record("", member(me, swarm="b" * 52), me), me.peer_id),
        "under another key": dht_record(good, me.peer_id, bits[:1]),
        "under another swarm's key": dht_record(good, me.peer_id, swarm="b" * 52),
        "off its path": dht_record(make_record(wrong[:1], member(me), me), me.peer_id, wrong[:1]),
        "living too long": dht_record(good, me.peer_id, expires_in=MAX_TTL_S + 5),
        "from the future": dht_record(
            make_record("", member(me, issued=time.time() + DATED_AHEAD_S + 9), me), me.peer_id
        ),
        "not of this kind": dht_record(b"anything", me.peer_id),
        "too large": dht_record(bytes(10_000), me.peer_id),
        "no subkey": dht_record(good, None),
        "subkey of another type": dht_record(good, 7),
        "another message": dht_record(msgpack.packb(["", b""]), me.peer_id),
        "no text prefix": dht_record(msgpack.packb([7, seal(member(me), me)]), me.peer_id),
        "odd prefix": dht_record(msgpack.packb(["2", seal(member(me), me)]), me.peer_id),
        "three parts": dht_record(msgpack.packb(["", seal(member(me), me), 1]), me.peer_id),
    }
    assert accepted(dht_record(good, me.peer_id))
    assert [what for what, record in refused.items() if accepted(record)] == []


def test_hostile_bytes_never_raise(me):
    rng = random.Random(0)
    good = make_record("", member(me), me)
    validator = MemberValidator(SWARM)
    for _ in range(500):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        raw = bytes(data[: rng.randrange(len(data) + 1)])
        assert raw == good or open_record(raw) is None
        assert not validator.validate(DHTRecord(b"", raw[:5], raw, 0.0))


# -- who is barred, without a network --------------------------------------------------------------


def test_who_is_barred_is_no_member_but_can_be_found():
    me, good, bad, gone = (Identity.ephemeral() for _ in range(4))
    barred = set()
    directory = Directory(Quiet(), me, SWARM, barred=barred.__contains__)
    directory.announce(**ABOUT)
    for record in (member(good), member(bad), member(gone, state="done")):
        assert directory.hear(record)
    here, everybody = {me.peer_id, good.peer_id}, {me.peer_id, good.peer_id, bad.peer_id}
    assert set(directory.members()) == set(directory.everyone()) == everybody
    barred |= {bad.peer_id, gone.peer_id, me.peer_id}
    assert set(directory.members()) == here  # a node does not leave itself out
    assert set(directory.everyone()) == everybody
    assert directory.departed() == {}
    assert not directory.wait_for(3, 0.0)
    assert [directory.is_barred(who.peer_id) for who in (me, good, bad)] == [False, False, True]
    barred.clear()
    assert set(directory.members()) == everybody
    assert set(directory.departed()) == {gone.peer_id}
    directory.barred = lambda peer: True  # set later, as by what knows of bans
    assert set(directory.members()) == {me.peer_id}


# -- real hosts ------------------------------------------------------------------------------------


def round_of(node, other):
    """The round of ``other`` as ``node`` knows it; ``None`` while it knows nothing of the other."""
    member = node.directory.members().get(other.peer_id)
    return member and member.round


@pytest.fixture
def four():
    quick = {"ttl": 30.0, "period": 0.5, "cap": 2}
    nodes = [Node(**quick)]
    nodes += [Node(nodes[0].host.addresses(), **quick) for _ in range(3)]
    yield nodes
    for node in nodes:
        node.close()


@pytest.mark.ci
def test_four_nodes_meet_and_one_leaves(four):
    """Four nodes see each other and one that leaves is gone at once."""
    for number, node in enumerate(four):
        node.say(name=f"n{number}", shard=number, shards=4, loss=2.5)
    everyone = {node.peer_id for node in four}
    for node in four:
        assert node.directory.wait_for(4, 60)
        assert set(node.directory.members()) == everyone
    seen = four[0].directory.members()[four[3].peer_id]
    assert (seen.name, seen.shard, seen.loss, seen.addresses) == (
        "n3",
        3,
        2.5,
        four[3].host.addresses(),
    )

    four[1].say(name="n1", round=7)
    until(lambda: round_of(four[2], four[1]) == 7)

    assert four[3].directory.leave(5)
    four[3].host.close()
    rest = everyone - {four[3].peer_id}
    until(lambda: all(set(node.directory.members()) == rest for node in four[:3]))
    assert set(four[0].directory.departed()) == {
        four[3].peer_id
    }  # by its word, not because its record expired

    four[2].say(name="n2", state="done")
    until(lambda: four[2].peer_id not in four[0].directory.members())
    assert {four[2].peer_id, four[3].peer_id} == set(four[0].directory.departed())
    # Sharded: with room for two per key, some moved on, and nobody lost sight of anybody.
    until(lambda: any(node.directory._publisher.prefix for node in four[:3]))


@pytest.mark.ci
def test_a_node_that_dies_without_a_word_expires(four):
    for node in four[:2]:
        node.directory._table.ttl = 2.0
        node.say()
    assert all(node.directory.wait_for(2, 60) for node in four[:2])
    four[1].close()
    until(lambda: set(four[0].directory.members()) == {four[0].peer_id})
    assert four[0].directory.departed() == {}


@pytest.mark.ci
def test_records_of_another_swarm_and_foreign_keys_find_no_shelf(four):
    stranger = Node(four[0].host.addresses(), swarm="b" * 52)
    try:
        stranger.say()
        for node in four[:2]:
            node.say()
        assert four[0].directory.wait_for(2, 60)
        assert set(four[0].directory.members()) == {node.peer_id for node in four[:2]}
        assert stranger.peer_id not in four[0].host.call(four[0].host.get(key_of("b" * 52, "")), 60)
        assert not stranger.host.call(stranger.host.store("anything", "at all", b"x", 20), 60)
    finally:
        stranger.close()


@pytest.mark.ci
def test_a_daemon_restart_is_survived(four):
    for node in four[:2]:
        node.say()
    assert all(node.directory.wait_for(2, 60) for node in four[:2])
    four[1].host._supervisor.daemon._child.kill()
    until(lambda: four[1].host.restarts == 1)
    four[1].say(round=9)
    until(lambda: round_of(four[0], four[1]) == 9)
    four[0].say(round=8)
    until(lambda: round_of(four[1], four[0]) == 8)


def test_waiting_ends_in_time_or_when_told(four):
    four[0].say()
    began = time.monotonic()
    assert not four[0].directory.wait_for(5, 0.3)
    assert time.monotonic() - began >= 0.3
    answers = iter([False, False, True])  # asked once more it would raise
    assert not four[0].directory.wait_for(5, 600, lambda: next(answers))
    assert four[0].directory.wait_for(1, 0)


def test_own_record_needs_no_network_and_bad_fields_are_refused(four):
    directory = four[0].directory
    assert directory.members() == {}
    assert directory.leave(1)  # nothing to take back
    node = four[1]
    with pytest.raises(ValueError):
        node.say(steps_per_s=float("nan"))
    node.say(step=77)
    assert node.directory.members()[node.peer_id].step == 77
    node.host.close()
    assert not node.directory.leave(1)
    with pytest.raises(NetworkError):
        node.directory.refresh(1)


def test_a_clock_far_ahead_is_ignored_and_named(four, caplog, me):
    value = make_record("", member(me, issued=time.time() + 100), me)
    assert four[1].host.call(four[1].host.store(key_of(SWARM, ""), me.peer_id, value, 60), 60)
    four[0].directory.refresh(5)
    four[0].directory.refresh(5)
    assert me.peer_id not in four[0].directory.members()
    warned = [
        r
        for r in caplog.records
        if "its clock, or ours" in r.getMessage() and me.peer_id[-8:] in r.getMessage()
    ]
    assert 1 <= len(warned) <= len(four)


@pytest.mark.parametrize(("dialled", "addresses", "punched", "reach"), [
    ("direct", ["/ip4/8.8.8.8/tcp/1/p2p/x/p2p-circuit/p2p/me"], True, "direct"),
    ("unreachable", ["/ip4/8.8.8.8/tcp/1/p2p/x/p2p-circuit/p2p/me"], True, "punched"),
    ("unknown", ["/ip4/8.8.8.8/tcp/1/p2p/x/p2p-circuit/p2p/me"], False, "relayed"),
    ("local", ["/ip4/192.168.1.2/tcp/1/p2p/me"], True, "local"),
])  # fmt: skip
def test_record_says_its_way_and_throughput(dialled, addresses, punched, reach):
    """A record says by which way exchanges go and what that moves."""
    record = OwnRecord(
        SWARM, "peer", addresses=lambda: addresses, now=lambda: 0.0, ticket=lambda: b""
    )
    record.dialled = dialled
    record.exchanges = lambda: (punched, 1.5e6)
    assert (record.link().reach, record.link().bytes_per_s) == (reach, 1.5e6)


class Board(LoopThread, Table):
    """A table on a loop that runs. ``reading`` is called for each reading of the root."""

    def __init__(self, reading):
        LoopThread.__init__(self)
        Table.__init__(self)
        self.reading, self.stored = reading, 0

    async def store(self, key, subkey, value, ttl):
        self.stored += 1
        return True

    async def get(self, key):
        found = await super().get(key)
        await self.reading(self)
        return found


@pytest.fixture
def start():
    boards = []

    def made(reading):
        board = Board(reading)
        boards.append(board)
        return board, Directory(board, Identity.ephemeral(), SWARM, period=0.05, ttl=6.0)

    yield made
    for board in boards:
        board.close()


async def never_again(board):
    if board.reads > 1:
        await asyncio.Event().wait()


async def broken(board):
    raise NetworkError("the DHT did not answer.")


@pytest.mark.parametrize("reading", [never_again, broken])
def test_node_is_published_whatever_its_reading(start, reading):
    """A node is published again and again however its reading goes."""
    board, directory = start(reading)
    directory.announce(**ABOUT)
    until(lambda: board.stored >= 4)
    assert directory._publisher.prefix == ""


def test_an_older_record_does_not_replace_a_newer_one(start):
    """As when another node of the DHT still has the record from under another key, or an earlier
    reading.
    """

    async def at_once(board):
        pass

    board, directory = start(at_once)
    other, now = Identity.ephemeral(), time.time()

    def put(prefix, round, issued):
        record = make_record(prefix, member(other, round=round, issued=issued), other)
        board.keys[key_of(SWARM, prefix)] = {other.peer_id: record}

    directory._publisher.prefix = bits_of(other.peer_id)[
        :1
    ]  # so that the key below the root is read as well
    directory._run_future.cancel()
    put("", 7, now)
    put(bits_of(other.peer_id)[:1], 5, now - 2)
    directory.refresh(10)
    assert directory.members()[other.peer_id].round == 7
    put("", 6, now - 1)
    directory.refresh(10)
    assert directory.members()[other.peer_id].round == 7
    put("", 8, now + 1)
    directory.refresh(10)
    assert directory.members()[other.peer_id].round == 8


class SlowBoard(Board):
    """A reading and a publication take so many seconds of the clock ``now``, in which nothing else
    happens.
    """

    def __init__(self, reading_s, publication_s):
        super().__init__(self.read)
        self.reading_s, self.publication_s, self.now = reading_s, publication_s, 0.0

    async def read(self, board):
        self.now += self.reading_s

    async def store(self, key, subkey, value, ttl):
        self.now += self.publication_s
        return await super().store(key, subkey, value, ttl)


@pytest.mark.parametrize(
    ("reading_s", "publication_s", "expected"),
    [(0.9, 0.9, set()), (1.2, 0.9, {3.6}), (0.9, 1.2, {3.6}), (20.0, 1.2, {4.5, 3.6})],
)
def test_long_work_is_followed_by_a_rest(monkeypatch, reading_s, publication_s, expected):
    """What took long is followed by a rest so that peers in haste do not starve each other."""
    board, rests, sleep = SlowBoard(reading_s, publication_s), [], asyncio.sleep

    async def pause(self, wake, seconds):
        board.now += seconds
        await sleep(0)

    async def resting(seconds):
        rests.append(round(seconds, 6))
        await sleep(0)

    monkeypatch.setattr(directory_loops.DirectoryLoops, "_sleep", pause)
    monkeypatch.setattr(
        directory_loops, "time", SimpleNamespace(monotonic=lambda: board.now, time=time.time)
    )
    monkeypatch.setattr(
        directory_loops, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": resting})
    )
    try:
        directory = Directory(board, Identity.ephemeral(), SWARM, period=5.0, ttl=27.0)
        directory.announce(**ABOUT)
        until(lambda: min(board.reads, board.stored) >= 3)
        directory.close()
    finally:
        board.close()
    assert {seconds for seconds in rests if seconds > directory_loops.MIN_GAP_S} == expected


def test_each_place_gets_a_record_of_the_moment(monkeypatch):
    """The DHT refuses what expires later than its date allows: a first store that took two seconds
    spoiled the second.
    """
    now, issued = [1000.0], []
    directory = Directory(Quiet(), Identity.ephemeral(), "a" * 52)
    directory.announce(**ABOUT)
    monkeypatch.setattr(directory, "now", lambda: now[0])
    monkeypatch.setattr(directory._index, "places", lambda prefix, keys: ["0", "1"])

    async def store(key, subkey, value, seconds):
        issued.append(unseal(msgpack.unpackb(value)[1], Member)[1].issued)
        now[0] += 2.0
        return True

    monkeypatch.setattr(directory._host, "store", store)
    assert asyncio.run(directory._publish())
    assert issued == [1000.0, 1002.0]


def test_an_announcement_is_urgent_until_it_is_published():
    """Else every reading would publish too."""
    directory = Directory(Quiet(), Identity.ephemeral(), "a" * 52)
    directory.announce(**ABOUT)
    assert directory._publisher.urgent
    assert asyncio.run(directory._publish())
    assert not directory._publisher.urgent
