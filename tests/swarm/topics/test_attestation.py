"""Records of verification: their signatures, and their way between two real hosts, one of which
sends forged ones and too many.
"""

import asyncio
import os

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shoal.swarm.errors import MessageError
from shoal.swarm.gossip.envelope import make_body, make_envelope
from shoal.swarm.gossip.gossip import Gossip
from shoal.swarm.identity import SIGNATURE_BYTES, Identity
from shoal.swarm.manifest import swarm_id
from shoal.swarm.topics.attestation import (
    CONTEXT,
    MAX_RECORD_BYTES,
    QUOTA,
    Attestation,
    Attestations,
    sign_record,
    verify_record,
)
from shoal.swarm.wire.envelope import pack, seal, unpack, unseal
from tests.support import gossip_nodes as nodes
from tests.support.reasons import raises_for
from tests.support.waiting import until

SWARM = swarm_id(b"")
ME, OTHER = Identity.ephemeral(), Identity.ephemeral()


def attestation(identity=ME, record=b"record", **changes):
    fields = {
        "swarm": SWARM,
        "peer": identity.peer_id,
        "record": record,
        "signature": sign_record(identity, record),
    }
    return Attestation(**{**fields, **changes})


@given(st.binary(max_size=3000), st.binary(max_size=80), st.integers(0, 63))
def test_signature_binds_author_record_and_context(data, noise, at):
    """A signature is of one author one record and one context."""
    signature = sign_record(ME, data)
    assert len(signature) == SIGNATURE_BYTES
    assert verify_record(ME.peer_id, data, signature)
    assert not verify_record(OTHER.peer_id, data, signature)
    assert not verify_record(ME.peer_id, data + b"\x00", signature)
    assert not verify_record(
        ME.peer_id, data, signature[:at] + bytes([signature[at] ^ 1]) + signature[at + 1 :]
    )
    assert not verify_record(ME.peer_id, data, noise)
    assert not verify_record(ME.peer_id, data, ME.sign("shoal/attestation/1", data))
    assert CONTEXT == "shoal/verification/1"


@pytest.mark.parametrize("hostile", [None, 7, "text", b"", [], "1" * 52, "é" * 52])
def test_hostile_input_is_no_signature(hostile):
    assert not verify_record(hostile, b"record", sign_record(ME, b"record"))
    assert not verify_record(ME.peer_id, b"record", hostile)
    if not isinstance(hostile, bytes):
        assert not verify_record(ME.peer_id, hostile, bytes(64))


@given(st.binary(min_size=1, max_size=MAX_RECORD_BYTES))
def test_round_trip(record):
    message = attestation(record=record)
    assert unpack(pack(message), Attestation) == message
    assert unseal(seal(message, ME), Attestation) == (ME.peer_id, message)


def test_bounds():
    assert len(pack(attestation(record=os.urandom(MAX_RECORD_BYTES)))) < Attestation.LIMIT
    for changes in (
        {"record": b""},
        {"record": bytes(MAX_RECORD_BYTES + 1)},
        {"signature": bytes(63)},
        {"signature": bytes(65)},
    ):
        with pytest.raises(ValidationError):
            attestation(**changes)


# -- over the network ------------------------------------------------------------------------------


class Node(nodes.Node):
    def __init__(self, bootstrap=()):
        super().__init__(bootstrap)
        self.got = []
        self.attestations = Attestations(self.gossip, self.take)

    def take(self, author, record, signature):
        if record.startswith(b"bad"):
            raise MessageError("This record contradicts itself.", "contradiction")
        self.got.append((author, record, signature))

    def say(self, record):
        self.attestations.publish(record, sign_record(self.identity, record))
        return self.identity.peer_id, record, sign_record(self.identity, record)

    def publish_raw(self, message):
        super().publish_raw(self.attestations.topic, self.seal(message))


@pytest.fixture
def pair():
    with nodes.two(Node) as made:
        until(lambda: all(node.attestations.topic.listeners() for node in made))
        yield made


def test_records_arrive_once_with_the_signature_of_their_author(pair):
    first, second = pair
    said = [first.say(os.urandom(MAX_RECORD_BYTES)), first.say(b"x")]
    first.say(b"x")  # again: it is known
    until(lambda: sorted(second.got) == sorted(said))
    answer = second.say(b"y")
    until(lambda: first.got == [answer])
    assert all(verify_record(*item) for item in second.got)
    until(lambda: first.attestations.topic.counts["sent"] == 3)
    assert second.attestations.topic.counts["received"] == 2
    assert second.attestations.topic.counts["rejected"] == {}


def test_bad_records_are_counted_and_harmless(pair):
    """Forged foreign and refused records are counted and cost nothing else."""
    attacker, victim = pair
    me = attacker.identity
    attacker.publish_raw(attestation(me, b"1", signature=bytes(64)))
    attacker.publish_raw(attestation(me, b"2", signature=sign_record(OTHER, b"2")))
    attacker.publish_raw(attestation(me, b"3", signature=me.sign("shoal/attestation/1", b"3")))
    attacker.publish_raw(
        attestation(OTHER, b"4")
    )  # another's record, well signed, but sealed by this one
    attacker.publish_raw(attestation(me, b"5", swarm=swarm_id(b"x")))
    attacker.say(b"bad record")
    good = attacker.say(b"good")
    until(lambda: victim.attestations.topic.counts["received"] == 7)
    until(
        lambda: (
            victim.attestations.topic.counts["rejected"]
            == {"forged": 4, "foreign-swarm": 1, "contradiction": 1}
        )
    )
    until(lambda: victim.got == [good])


def test_what_cannot_be_published_is_said_at_once(pair):
    first, _ = pair
    for record in (b"", bytes(MAX_RECORD_BYTES + 1)):
        with raises_for("oversized", MessageError):
            first.say(record)
    with raises_for("forged", MessageError):
        first.attestations.publish(b"record", sign_record(OTHER, b"record"))


def test_a_whole_draw_may_vote_at_once(network):
    """None within the quota may be lost on a node that opens them slowly."""
    host, voters, got = network.host(), [Identity.ephemeral() for _ in range(4)], []
    votes = [
        attestation(voters[number % 4], b"%d" % number) for number in range(QUOTA.messages + 400)
    ]
    by_peer = {voter.peer_id: voter for voter in voters}
    data = [make_envelope(SWARM, make_body(vote, by_peer[vote.peer])) for vote in votes]
    gossip = Gossip(host, host.identity, SWARM, members=dict)
    attestations = Attestations(
        gossip, lambda author, record, signature: got.append((author, record))
    )

    async def all_at_once():
        take = attestations.topic.take
        await asyncio.gather(*(take(OTHER.peer_id, blake3(each).digest(), each) for each in data))

    network.call(all_at_once(), 60)
    assert set(got) == {(vote.peer, vote.record) for vote in votes}
    assert attestations.topic.counts["rejected"] == {}
    gossip.close()
