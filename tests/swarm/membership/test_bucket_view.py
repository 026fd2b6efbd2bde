"""A directory of a swarm of buckets: whom it lists, where it publishes, and what it takes the swarm's size for."""

import asyncio
import time
from collections import defaultdict

from shoal.swarm.identity import Identity
from shoal.swarm.membership.dht_record import bits_in, bucket_prefix, key_of, make_record
from shoal.swarm.membership.directory import Directory
from shoal.swarm.wire.member import Member
from tests.swarm.membership.conftest import ABOUT, Quiet

SWARM, EPOCH_S = "a" * 52, 3600.0


class Shelf(Quiet):
    """A host without a network, with a table for the DHT."""

    def __init__(self):
        self.keys = defaultdict(dict)

    def remember(self, addresses):
        self.remembered = list(addresses)

    def call(self, coroutine, timeout):
        return asyncio.run(coroutine)

    async def get(self, key):
        return dict(self.keys[key])

    async def store(self, key, subkey, value, ttl):
        self.keys[key][subkey] = value
        return True


def test_members_are_those_of_the_bucket_and_others_can_still_be_reached():
    shelf, epoch, me = Shelf(), int((time.time() + 60) // EPOCH_S), Identity.ephemeral()
    own = bits_in(SWARM, epoch, me.peer_id)[:2]
    there = []
    for _ in range(40):
        peer = Identity.ephemeral()
        prefix = bucket_prefix(epoch, bits_in(SWARM, epoch, peer.peer_id)[:2])
        member = Member(swarm=SWARM, peer=peer.peer_id, addresses=(), issued=time.time(), **ABOUT)
        shelf.keys[key_of(SWARM, prefix)][peer.peer_id] = make_record(prefix, member, peer)
        there += [peer.peer_id] * prefix.endswith(f"/{own}")
    directory = Directory(shelf, me, SWARM, bucket=32, epoch_s=EPOCH_S)
    directory.skew = epoch * EPOCH_S + 100.0 - time.time()  # by the clock of the others the epoch has begun a moment ago
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
