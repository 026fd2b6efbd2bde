"""Thousands of made-up members in the directory: honest ones stay visible, and memory and reading
are bounded.
"""

import asyncio
import random
import time

import pytest
from hivemind.dht.routing import DHTID

from shoal.swarm.identity import Identity
from shoal.swarm.membership import trie
from shoal.swarm.membership.directory import Directory
from shoal.swarm.membership.records import bits_of, key_of, make_record, open_record
from shoal.swarm.membership.room import NEWCOMERS_ONE_IN, Room
from shoal.swarm.p2p.addresses import range_of
from shoal.swarm.p2p.hivemind_adapter import MAX_SUBKEYS, BoundedStorage
from shoal.swarm.wire.messages import Member
from tests.support.directory_hosts import Shelf
from tests.support.records import member_of

SWARM, MOST = "a" * 52, 64


def record(peer, address="/ip4/203.0.113.1/tcp/1", issued=0.0):
    return Member.model_construct(
        peer=peer, addresses=(address,) if address else (), state="training", issued=issued
    )


def crowd(count, address="/ip4/198.51.{n}.7/tcp/1", name="made-up"):
    return {
        f"{name}{n}": record(f"{name}{n}", address.format(n=n % 256, m=n)) for n in range(count)
    }


def test_as_long_as_there_is_room_all_nodes_see_all():
    members = crowd(MOST)
    assert (
        Room({}, MOST).choose(members, 0)
        == Room({"made-up3": "192.0.2.1"}, MOST, b"x").choose(members, 9)
        == members
    )


@pytest.mark.parametrize(
    "honest_at",
    ["/ip4/127.0.0.1/tcp/{m}", "/ip4/192.168.0.{n}/tcp/1", "/ip6/2001:db8::{n}/tcp/1", ""],
)
@pytest.mark.parametrize(
    "made_up_at",
    ["/ip4/198.51.{n}.7/tcp/1", "/ip4/{n}.{m}.0.1/tcp/1", "/ip4/127.0.0.1/tcp/{m}", ""],
)
def test_members_that_were_met_keep_their_place(honest_at, made_up_at):
    honest = crowd(30, honest_at, "honest")
    met = dict.fromkeys(honest, "127.0.0.1")
    room = Room(met, MOST)
    for look in range(3):  # the made-up ones may be the first, and are others each time
        made_up = crowd(1500, made_up_at, f"{look}made-up")
        kept = room.choose(made_up if look == 0 else made_up | honest, look)
        assert len(kept) == len(room._in_view) == MOST
        assert look == 0 or honest.keys() <= kept.keys()


def test_one_range_does_not_crowd_out_others():
    """Members that were met at one range do not keep out those of others."""
    hostile, honest = crowd(2000), crowd(20, name="honest")
    met = dict.fromkeys(hostile, "198.51.100.1") | {
        peer: f"203.{n}.113.1" for n, peer in enumerate(honest)
    }
    assert honest.keys() <= Room(met, MOST).choose(hostile | honest, 0).keys()


def test_unmet_members_stay_by_age_and_range():
    """Members that nobody met stay if they were there first and in ranges of their own."""
    first = crowd(20, "/ip4/{n}.7.0.1/tcp/1", "first")
    room = Room({}, MOST)
    room.choose(first, 0)
    assert first.keys() <= room.choose(crowd(1500, "/ip4/203.0.{n}.1/tcp/1") | first, 1).keys()
    assert first.keys() <= room.choose(crowd(1500, "/ip4/{n}.{m}.0.1/tcp/1") | first, 2).keys()


def test_each_newcomer_is_seen_eventually():
    """Each newcomer is seen sooner or later whatever was there before."""
    met = {f"made-up{n}": f"{n}.0.0.1" for n in range(500)}
    members, room, seen = crowd(500), Room(met, MOST), set()
    for draw in range(400):
        kept = room.choose(members | {"newcomer": record("newcomer")}, draw)
        seen.update(kept)
        assert sum(peer in met for peer in kept) >= MOST - MOST // NEWCOMERS_ONE_IN
    assert "newcomer" in seen


def test_address_ranges():
    assert range_of("10.1.2.3") == range_of("10.1.9.9") != range_of("10.2.2.3")
    assert range_of("2001:db8::1") == range_of("2001:db8:ffff::1") != range_of("2001:db9::1")
    assert range_of("a.example.org") == range_of("B.example.org") == "example.org"
    assert range_of("") == ""


# -- the trie --------------------------------------------------------------------------------------


def grind(prefix, count, rng):
    found = []
    while len(found) < count:
        peer = f"made-up{rng.getrandbits(64):x}"
        if bits_of(peer).startswith(prefix):
            found.append(peer)
    return found


def test_met_members_are_read_below_full_keys():
    """Members that were met are read below keys full of strangers."""
    rng, cap, limit = random.Random(3), 4, 40
    shelf = {f"{k:0{depth}b}" if depth else "": None for depth in range(6) for k in range(2**depth)}
    shelf = {
        prefix: dict.fromkeys(grind(prefix, cap * trie.CROWD_FACTOR, rng), True) for prefix in shelf
    }
    honest = [f"honest{n}" for n in range(12)]
    for peer in honest:  # a level below those that are full
        shelf.setdefault(bits_of(peer)[:6], {})[peer] = True
    reads = []

    async def get(prefix):
        reads.append(prefix)
        return shelf.get(prefix, {})

    def look(known):
        reads.clear()
        keys = asyncio.run(trie.read(get, bits_of("me"), cap=cap, limit=limit, known=known))
        return {peer for names in keys.values() for peer in names}

    assert not look([]) & set(honest)
    assert set(honest) <= look(honest)
    assert len(reads) == len(set(reads)) <= trie.MAX_KEYS
    look([f"someone{n}" for n in range(4000)])
    assert len(reads) < trie.MAX_KEYS + trie.KEYS_AT_ONCE


def signed(identity, prefix, issued):
    return make_record(prefix, member_of(identity.peer_id, issued=issued), identity)


def test_directory_opens_a_bounded_part_of_a_key(monkeypatch):
    """A directory opens a bounded part of a key and keeps who it met."""
    board, now = Shelf(), time.time()
    people = sorted(
        (Identity.ephemeral() for _ in range(200)), key=lambda who: bits_of(who.peer_id)
    )
    *_, last = people  # the one that the strangers displace
    board.keys[key_of(SWARM, "")] = {who.peer_id: signed(who, "", now) for who in people[:-1]}
    strangers, depth = people[:-1], 0
    while len(strangers) >= 4:  # it goes down until there is room
        depth += 1
        prefix = bits_of(last.peer_id)[:depth]
        strangers = [who for who in strangers if bits_of(who.peer_id).startswith(prefix)]
        board.keys[key_of(SWARM, prefix)] = {
            who.peer_id: signed(who, prefix, now) for who in strangers
        }
    board.keys[key_of(SWARM, prefix)][last.peer_id] = signed(last, prefix, now)
    met = {last.peer_id: "192.0.2.1"}
    directory = Directory(board, Identity.ephemeral(), SWARM, cap=4, limit=8, met=met)
    opened = []
    monkeypatch.setattr(
        "shoal.swarm.membership.record_reader.open_record",
        lambda data: opened.append(data) or open_record(data),
    )
    for _ in range(3):
        board.reads = 0
        opened.clear()
        directory.refresh(10)
        assert last.peer_id in directory.members()
        assert len(directory._table.peers()) <= 8
        assert len(opened) <= board.reads * 4 * trie.CROWD_FACTOR


def test_node_stores_bounded_records_per_key():
    """A node stores a bounded number of records under a key the same as any other."""
    key, end = DHTID.generate(source="key"), time.time() + 60
    peers = [f"peer{n}" for n in range(500)]
    kept = []
    for order in (peers, peers[::-1]):
        storage = BoundedStorage()
        for peer in order:
            storage.store_subkey(key, peer, b"x", end)
        kept.append({peer for peer, _ in storage.get(key).value.items()})
        assert len(kept[-1]) == MAX_SUBKEYS
        last = max(kept[-1], key=bits_of)
        assert storage.store_subkey(key, last, b"newer", end + 1)  # who has a place renews it
        assert storage.get(key).value.get(last).value == b"newer"
    assert kept[0] == kept[1] == set(sorted(peers, key=bits_of)[:MAX_SUBKEYS])
