"""The search for one peer's record: at every depth its bucket can have, in this epoch alone."""

import asyncio
import time

import pytest

from shoal.swarm.errors import NetworkError
from shoal.swarm.identity import Identity
from shoal.swarm.membership.dht import DEEPEST, bits_in, bits_of, bucket_prefix, is_in_its_bucket, key_of, make_record
from shoal.swarm.wire.messages import Member
from tests.swarm.membership.conftest import ABOUT

SWARM, EPOCH = "a" * 52, 7
PEER = Identity.ephemeral()
OWN = bits_in(SWARM, EPOCH, PEER.peer_id)


def table(prefix, key=None):
    member = Member(swarm=SWARM, peer=PEER.peer_id, addresses=(), issued=time.time(), **ABOUT)
    return {key_of(SWARM, prefix if key is None else key): {PEER.peer_id: make_record(prefix, member, PEER)}}


def searched(keys, broken=()):
    async def get(key):
        if key in broken:
            raise NetworkError("gone")
        return keys.get(key, {})

    return asyncio.run(is_in_its_bucket(get, SWARM, PEER.peer_id, EPOCH))


@pytest.mark.parametrize(
    "prefix",
    ["", bits_of(PEER.peer_id)[:3], bucket_prefix(EPOCH, OWN[:1]), bucket_prefix(EPOCH, OWN[:DEEPEST])],
    ids=["everyone", "another", "one bit", "deepest"],
)
def test_a_record_is_found_at_any_depth(prefix):
    assert searched(table(prefix))


def test_a_record_of_another_epoch_or_under_another_key_does_not_count():
    assert not searched({})
    other = EPOCH + 1
    assert not searched(table(bucket_prefix(other, bits_in(SWARM, other, PEER.peer_id)[:2])))
    assert not searched(table(bucket_prefix(EPOCH, OWN[:2]), key=bucket_prefix(EPOCH, OWN[:3])))
    assert not searched({key_of(SWARM, ""): {PEER.peer_id: b"junk"}})


def test_keys_that_cannot_be_read_are_passed_over_unless_they_are_all():
    keys = table(bucket_prefix(EPOCH, OWN[:2]))
    assert searched(keys, broken={key_of(SWARM, "")})
    every = {key_of(SWARM, bucket_prefix(EPOCH, OWN[:depth])) for depth in range(1, DEEPEST + 1)}
    every |= {key_of(SWARM, bits_of(PEER.peer_id)[:depth]) for depth in range(DEEPEST + 1)}
    with pytest.raises(NetworkError, match="no key of the peer's bucket"):
        searched({}, broken=every)
