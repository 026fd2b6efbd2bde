"""A directory of a swarm of buckets: whom it lists, where it publishes, and what it takes the swarm's size for."""

import asyncio
import time
from types import SimpleNamespace

from shoal.swarm.identity import Identity
from shoal.swarm.membership.dht import bits_in, bucket_prefix, key_of, make_record
from shoal.swarm.membership.directory import Directory
from shoal.swarm.wire.messages import Member
from tests.swarm.membership.conftest import ABOUT, Shelf

SWARM, EPOCH_S = "a" * 52, 3600.0


def test_members_are_those_of_the_bucket_and_others_can_still_be_reached():
    shelf, epoch, me = Shelf(), int((time.time() + 60) // EPOCH_S), Identity.ephemeral()
    own = bits_in(SWARM, epoch, me.peer_id)[:2]
    skew = epoch * EPOCH_S + 100.0 - time.time()  # by the clock of the others the epoch has begun a moment ago
    there = []
    for _ in range(40):
        peer = Identity.ephemeral()
        prefix = bucket_prefix(epoch, bits_in(SWARM, epoch, peer.peer_id)[:2])
        member = Member(swarm=SWARM, peer=peer.peer_id, addresses=(), issued=time.time() + skew, **ABOUT)
        shelf.keys[key_of(SWARM, prefix)][peer.peer_id] = make_record(prefix, member, peer)
        there += [peer.peer_id] * prefix.endswith(f"/{own}")
    directory = Directory(shelf, me, SWARM, bucket=32, epoch_s=EPOCH_S)
    directory.skew = skew
    directory.announce(**ABOUT)
    directory.refresh(5)
    assert set(directory.members()) == {me.peer_id, *there}
    assert directory.size() == 4 * (len(there) + 1)
    assert directory.wait_for(directory.size(), 0.0)
    assert all(directory.belongs(peer) for peer in there)
    assert directory.leave(5)
    assert me.peer_id in shelf.keys[key_of(SWARM, bucket_prefix(epoch, own))]


def test_who_was_in_the_bucket_just_before_can_still_be_reached():
    shelf, me, peer = Shelf(), Identity.ephemeral(), Identity.ephemeral()
    directory = Directory(shelf, me, SWARM, bucket=32, epoch_s=EPOCH_S)
    directory._seen = {peer.peer_id: Member(swarm=SWARM, peer=peer.peer_id, addresses=(), issued=time.time(), **ABOUT)}
    directory._index.shows = lambda peer: False
    assert not directory.members()
    assert not directory.departed()
    assert not directory.belongs(peer.peer_id)
    assert set(directory.everyone()) == {peer.peer_id}
    assert directory.knows(peer.peer_id)


def test_a_node_whose_clock_is_minutes_off_is_in_the_epoch_of_the_others_and_is_believed_by_them(monkeypatch):
    shelf, me, peer, now = Shelf(), Identity.ephemeral(), Identity.ephemeral(), 1e9
    monkeypatch.setattr(
        "shoal.swarm.membership.directory.time", SimpleNamespace(time=lambda: now - 125.0, monotonic=time.monotonic)
    )
    wrong = Directory(shelf, me, SWARM, bucket=4, epoch_s=30.0)
    wrong._index.begin(64)
    wrong.announce(**ABOUT)
    wrong.skew = 125.0
    wrong.refresh(5)
    asyncio.run(wrong._publish())
    (prefix,) = [key.rpartition("/m/")[2] for key, records in shelf.keys.items() if me.peer_id in records]
    assert prefix.startswith(f"{int(now // 30.0)}/") or not prefix
    assert wrong._index._current().epoch == int(now // 30.0)
    assert wrong.own().issued == now
    # What others date a moment ago is fresh, and not of the future.
    theirs = Member(swarm=SWARM, peer=peer.peer_id, addresses=(), issued=now - 1.0, **ABOUT)
    assert wrong.hear(theirs)
    assert peer.peer_id in wrong.everyone()


def test_a_visitor_reads_again_once_it_knows_where_its_bucket_is_and_sees_the_ones_beside():
    shelf, epoch = Shelf(), int(time.time() // EPOCH_S)
    directory = Directory(shelf, Identity.ephemeral(), SWARM, bucket=16, epoch_s=EPOCH_S, breadth=3)
    for _ in range(40):
        peer = Identity.ephemeral()
        for at in (epoch, epoch + 1):  # in case an hour ends here
            prefix = bucket_prefix(at, bits_in(SWARM, at, peer.peer_id)[:2])
            member = Member(swarm=SWARM, peer=peer.peer_id, addresses=(), issued=time.time(), **ABOUT)
            shelf.keys[key_of(SWARM, prefix)][peer.peer_id] = make_record(prefix, member, peer)
    directory.refresh(5)
    assert len(directory.members()) == directory.size() == 40
