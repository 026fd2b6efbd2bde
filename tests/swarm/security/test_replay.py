"""Records that are stored once more by somebody else: an old one must not take the place of a newer
one.
"""

import time

from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage
from hivemind.dht.validation import DHTRecord

from shoal.swarm.identity import Identity
from shoal.swarm.membership.records import MemberValidator, key_of, make_record
from tests.support.records import member_of

SWARM = "a" * 52


def dht_record(value, subkey, expires):
    return DHTRecord(
        key=DHTID.generate(source=key_of(SWARM, "")).to_bytes(),
        subkey=DHTProtocol.serializer.dumps(subkey),
        value=DHTProtocol.serializer.dumps(value),
        expiration_time=expires,
    )


def member(identity, issued):
    return member_of(identity.peer_id, round=1, step=1, issued=issued)


def test_replayed_record_displaces_nothing():
    """An old record that is replayed does not displace a newer one."""
    me, now, storage = Identity.ephemeral(), time.time(), DHTLocalStorage()

    def put(value, expires_in):
        record = dht_record(value, me.peer_id, now + expires_in)
        if not MemberValidator(SWARM).validate(record):
            return False
        return storage.store(
            DHTID(int.from_bytes(record.key, "big")),
            record.value,
            record.expiration_time,
            record.subkey,
        )

    old, new = (make_record("", member(me, now + at), me) for at in (-10.0, 0.0))
    assert put(old, 20.0)
    assert put(new, 30.0)
    assert [put(old, life) for life in (20.0, 30.5, 60.0)] == [
        False
    ] * 3  # the last two: a life of its own choice
    kept = storage.get(DHTID.generate(source=key_of(SWARM, ""))).value.get(
        DHTProtocol.serializer.dumps(me.peer_id)
    )
    assert DHTProtocol.serializer.loads(kept.value) == new
