"""EvidenceStore: bodies by their digest, between real hosts and fake ones; bounded in what is
taken, kept and handed out.
"""

import hashlib
import os

import pytest

from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.gossip.envelope import BodyReply, BodyRequest
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import swarm_id
from shoal.swarm.p2p.host import Host
from shoal.swarm.topics import evidence
from shoal.swarm.topics.evidence import EVIDENCE_PROTOCOL, MAX_BODIES, EvidenceStore
from shoal.swarm.wire.envelope import pack, unpack
from tests.support.reasons import raises_for

SWARM = swarm_id(b"")


def sha(body):
    return hashlib.sha256(body).digest()


@pytest.fixture(scope="module")
def pair():
    author, reader = Identity.ephemeral(), Identity.ephemeral()
    with (
        Host.start(author, timeout=60) as one,
        Host.start(reader, bootstrap=one.addresses(), timeout=60) as other,
    ):
        known = {one.peer_id: one.addresses(), other.peer_id: other.addresses()}
        yield tuple(
            EvidenceStore(host, SWARM, lambda peer: known.get(peer, ())) for host in (one, other)
        )


def peer_of(evidence):
    return evidence._host.peer_id


def test_a_body_is_fetched_by_its_digest_alone(pair):
    author, reader = pair
    for size in (1, 300_000, 9 << 20):
        body = os.urandom(size)
        digest = author.put(body)
        assert digest == sha(body)
        assert reader.get(peer_of(author), digest, size, 20) == body


def test_oversized_evidence_is_refused_unread(pair):
    """What is larger than wanted is refused before a byte of it comes."""
    author, reader = pair
    digest = author.put(os.urandom(1 << 20))
    before = reader._host.traffic.received
    with raises_for("oversized", MessageError):
        reader.get(peer_of(author), digest, (1 << 20) - 1, 20)
    assert reader._host.traffic.received - before < 100
    assert len(reader.get(peer_of(author), digest, 1 << 20, 20)) == 1 << 20
    with pytest.raises(MessageError) as caught:  # also now that it is here
        reader.get(peer_of(author), digest, 9, 20)
    assert caught.value.reason == "oversized"


def test_unknown_bodies_and_unknown_peers(pair):
    author, reader = pair
    with pytest.raises(MessageError) as caught:
        reader.get(peer_of(author), bytes(32), 100, 20)
    assert caught.value.reason == "unavailable"
    with pytest.raises(NetworkError):
        reader.get(Identity.ephemeral().peer_id, bytes(32), 100, 2)


# -- without daemons -------------------------------------------------------------------------------


@pytest.fixture
def two(network):
    return EvidenceStore(network.host(), SWARM), EvidenceStore(network.host(), SWARM)


def test_own_bodies_and_those_fetched_lately_need_no_network(network, two):
    author, reader = two
    mine, theirs = reader.put(b"mine"), author.put(b"theirs")
    assert reader.get(peer_of(author), mine, 100, 5) == b"mine"
    assert network.opened == []
    for _ in range(3):
        assert reader.get(peer_of(author), theirs, 100, 5) == b"theirs"
    assert [protocol for _, _, protocol in network.opened] == [EVIDENCE_PROTOCOL]
    author._host.die()
    assert reader.get(peer_of(author), theirs, 100, 5) == b"theirs"


def test_fetched_body_displaces_no_own(monkeypatch, network, two):
    """The fault: the evidence of others' claims pushed out the own, and an honest author seemed to
    withhold it.
    """
    (author, reader), third = two, EvidenceStore(network.host(), SWARM)
    mine, theirs = reader.put(b"mine"), [author.put(b"%d" % number * 100) for number in range(3)]
    monkeypatch.setattr(reader._store, "_max_bytes", 100)
    for digest in theirs:
        reader.get(peer_of(author), digest, 100, 5)
    author._host.die()
    handed_on = [third.get(peer_of(reader), digest, 100, 5) for digest in (mine, *theirs)]
    assert handed_on == [b"mine", b"0" * 100, b"1" * 100, b"2" * 100]


def test_what_was_fetched_is_forgotten_when_it_is_too_much(monkeypatch, network, two):
    monkeypatch.setattr(evidence, "MAX_FETCHED_BYTES", 10)
    author, reader = two
    first, second, third, large = (
        author.put(body) for body in (b"1" * 4, b"2" * 4, b"3" * 4, b"4" * 11)
    )

    def asked(digest):
        before = len(network.opened)
        reader.get(peer_of(author), digest, 100, 5)
        return len(network.opened) - before

    assert [asked(digest) for digest in (first, second, first, third)] == [1, 1, 0, 1]
    assert [asked(first), asked(large), asked(third), asked(large)] == [0, 1, 0, 1]
    assert asked(second) == 1  # it was used longest ago when the third came
    assert sum(map(len, reader._fetched.values())) <= 10
    stranger = EvidenceStore(network.host(), SWARM)
    assert (
        stranger.get(peer_of(reader), third, 100, 5) == b"3" * 4
    )  # a stranger keeps nothing here by asking again and again
    assert [asked(first), asked(third)] == [1, 1]


def test_newest_bodies_are_held(monkeypatch, two):
    """The newest bodies are held and one too large leaves them alone."""
    author, _ = two
    digests = [author.put(number.to_bytes(4, "big")) for number in range(MAX_BODIES + 2)]
    held = [author._store.get(digest) is not None for digest in digests]
    assert held == [False, False] + [True] * MAX_BODIES
    author.put((2).to_bytes(4, "big"))  # again: the same body, newer
    assert len(author._store._bodies) == MAX_BODIES
    monkeypatch.setattr(evidence, "MAX_BYTES", 10)
    for wrong in (b"", bytes(11)):
        with pytest.raises(ValueError):
            author.put(wrong)
    assert len(author._store._bodies) == MAX_BODIES


def liar(network, nbytes, body):
    """A host that announces ``nbytes`` and sends ``body``, whatever it is asked for."""
    host = network.host()

    async def answer(stream):
        unpack(await stream.receive(BodyRequest.LIMIT, 30), BodyRequest)
        await stream.send(pack(BodyReply(nbytes=nbytes)), 5)
        await stream.swap(
            memoryview(body), memoryview(bytearray()), chunk_timeout=5, deadline=stream_end()
        )

    def stream_end():
        return network.loop.time() + 5

    host.serve(EVIDENCE_PROTOCOL, answer)
    return host.peer_id


def test_other_bytes_than_those_named_are_refused(network, two):
    _, reader = two
    wanted = sha(b"wanted")
    with pytest.raises(MessageError) as caught:
        reader.get(liar(network, 6, b"wantex"), wanted, 100, 5)
    assert caught.value.reason == "digest"
    with pytest.raises(MessageError) as caught:
        reader.get(liar(network, 2**32, b""), wanted, 100, 5)
    assert caught.value.reason == "oversized"
    with pytest.raises(NetworkError):  # it ends in the middle
        reader.get(liar(network, 60, b"wanted"), wanted, 100, 5)
    assert reader.get(liar(network, 6, b"wanted"), wanted, 100, 5) == b"wanted"


def test_excessive_request_gets_nothing(monkeypatch, network):
    """A peer that asks for too much is answered as if nothing were held."""
    monkeypatch.setattr(evidence, "BODY_QUOTA", evidence.RateLimit(messages=3, nbytes=10))
    author, greedy, modest = (EvidenceStore(network.host(), SWARM) for _ in range(3))
    bodies = [author.put(body) for body in (b"123456", b"abcdef", b"x")]
    me = peer_of(author)
    assert greedy.get(me, bodies[0], 100, 5) == b"123456"
    with pytest.raises(MessageError) as caught:
        greedy.get(me, bodies[1], 100, 5)
    assert caught.value.reason == "unavailable"
    assert greedy.get(me, bodies[2], 100, 5) == b"x"  # there was room for this
    assert modest.get(me, bodies[1], 100, 5) == b"abcdef"


def test_the_body_of_another_swarm_is_not_held(network):
    author, stranger = (
        EvidenceStore(network.host(), SWARM),
        EvidenceStore(network.host(), swarm_id(b"other")),
    )
    with pytest.raises(MessageError) as caught:
        stranger.get(peer_of(author), author.put(b"body"), 100, 5)
    assert caught.value.reason == "unavailable"
