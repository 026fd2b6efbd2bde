"""What a watcher lets in, and under which reason it counts the rest."""

import os

import pytest

from shoal.node.watch.source import OLD_S, QUOTA, RecordFilter
from shoal.swarm.errors import MessageError
from shoal.swarm.gossip.envelope import Body, make_body, make_envelope
from shoal.swarm.manifest import swarm_id
from shoal.swarm.topics.status import Status
from shoal.swarm.wire.envelope import MAX_MESSAGE, pack, seal
from tests.node.watch.conftest import NOW, SWARM, Author


@pytest.fixture
def gate():
    return RecordFilter(Status, SWARM, clock=lambda: NOW)


def refused(gate, data, publisher="somebody"):
    with pytest.raises(MessageError) as caught:
        gate.open(publisher, data)
    assert gate.counters.rejected()[caught.value.reason] >= 1
    return caught.value.reason


def test_a_status_is_opened(gate, authors):
    anna, bert, _ = authors
    status = anna.status(anna.round(3, [bert]), reward=0.25, banned=(bert.peer,), faults=(("no-partner", 2),))
    assert gate.open("anybody", make_envelope(SWARM, make_body(status, anna.identity))) == status
    assert gate.counters.events() == {"received": 1, "accepted": 1}


def test_malformed_messages_cost_a_count_each(gate, authors):
    anna, bert, _ = authors
    good = anna.bytes()
    assert refused(gate, b"") == "truncated"
    assert refused(gate, os.urandom(64) + b"\xc1") in ("malformed", "truncated", "nested")
    assert refused(gate, good[: len(good) // 2]) == "truncated"
    assert refused(gate, bytes(MAX_MESSAGE + 1)) == "oversized"
    assert refused(gate, b"\x91" * 500) == "nested"
    sealed = seal(anna.status(), anna.identity)
    assert refused(gate, make_envelope(SWARM, Body("plain", len(sealed), sealed[:-1] + bytes([sealed[-1] ^ 1])))) == "forged"
    assert refused(gate, make_envelope(SWARM, Body("zlib", len(sealed), sealed))) == "malformed"
    assert refused(gate, make_envelope(SWARM, Body("plain", 1 << 30, sealed))) == "oversized"
    assert refused(gate, make_envelope(swarm_id(b"other"), make_body(anna.status(), anna.identity))) == "foreign-swarm"
    assert refused(gate, make_envelope(SWARM, make_body(anna.status(), bert.identity))) == "forged"  # bert speaks for anna
    foreign = anna.status(swarm=swarm_id(b"other"))
    assert refused(gate, make_envelope(SWARM, make_body(foreign, anna.identity))) == "foreign-swarm"
    assert gate.open("somebody", good) == anna.status()
    assert gate.counters.events()["received"] == sum(gate.counters.rejected().values()) + 1


def test_a_bomb_is_not_expanded(gate, authors):
    body = make_body(authors[0].status(name="a" * 64), authors[0].identity)
    assert body.encoding == "zlib"
    assert refused(gate, make_envelope(SWARM, Body("zlib", body.size - 1, body.data))) == "bomb"


def test_only_what_is_newer_counts(gate, authors):
    anna, bert, _ = authors
    gate.open("x", anna.bytes())
    assert refused(gate, anna.bytes()) == "replayed"
    assert refused(gate, anna.bytes(issued=NOW - 1)) == "replayed"
    gate.open("x", bert.bytes(issued=NOW - 1))
    gate.open("x", anna.bytes(issued=NOW + 0.5))
    assert refused(gate, anna.bytes(issued=NOW + OLD_S + 1)) == "old"
    assert refused(gate, Author("dora").bytes(issued=NOW - OLD_S - 1)) == "old"


def test_a_publisher_has_a_quota(gate, authors):
    anna, *_ = authors
    for number in range(QUOTA.messages):
        gate.open("loud", anna.bytes(issued=NOW + number / 1000))
    assert refused(gate, anna.bytes(issued=NOW + 10), "loud") == "quota"
    gate.open("another", anna.bytes(issued=NOW + 10))


def test_the_largest_status_fits():
    author = Author("n" * 64)
    others = [Author("x") for _ in range(8)]
    address = "/dns4/" + "a" * 200 + "/tcp/4001"
    status = author.status(
        *(author.round(2**52 + n, others, sent=2**40, received=2**40, step=2**53) for n in range(6)),
        addresses=(address,) * 4, banned=tuple(other.peer for other in others),
        faults=tuple((f"{'f' * 62}{n:02}", 2**53) for n in range(12)), sent=2**40, received=2**40, reward=0.1,
        rollouts_own=2**53, rollouts_foreign=2**53, claims=2**53, checked=2**53, invalid=2**53,
    )  # fmt: skip
    assert len(pack(status)) < status.LIMIT
    gate = RecordFilter(Status, SWARM, clock=lambda: NOW)
    assert gate.open("x", make_envelope(SWARM, make_body(status, author.identity))) == status
