"""What a session gets of its swarm: streams between hosts in memory, and a gossip that delivers at once."""

import hashlib
from types import SimpleNamespace

import pytest

from shoal.node.verify.audit import SwarmNetwork
from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.p2p.limits import Counters
from tests.swarm.conftest import SWARM, Network


class Gossip:
    """Of all nodes in ``everyone``; a topic of itself."""

    def __init__(self, everyone, identity):
        self.everyone, self.identity, self.swarm, self.counters = everyone, identity, SWARM, Counters()
        everyone.append(self)

    def join(self, kind, handler, quota, inbox):
        self.handler = handler
        return self

    def publish(self, message):
        self.counters.add("sent")
        for other in self.everyone:
            if other is not self:
                other.handler(message.peer, message)

    def close(self):
        self.everyone.remove(self)


@pytest.fixture
def two():
    """Two nodes of a swarm: networks that are not open yet, and what all know of each other."""
    made, everyone, known = Network(), [], {}
    networks = []
    for name in ("ann", "bob"):
        host = made.host()
        known[host.peer_id] = SimpleNamespace(name=name, addresses=())
        directory = SimpleNamespace(everyone=lambda: known, barred=lambda peer: False)
        directory.members = lambda own=directory: {peer: member for peer, member in known.items() if not own.barred(peer)}
        directory.addresses = lambda peer: known[peer].addresses if peer in known else ()
        membership = SimpleNamespace(identity=host.identity, host=host, directory=directory, swarm=SWARM)
        networks.append(SwarmNetwork(membership, Gossip(everyone, host.identity)))
    yield networks
    for network in networks:
        network.close()
    made.close()


def test_records_bodies_and_logs_go_from_one_to_the_other(two):
    ann, bob = two
    came, asked = [], []
    ann.open(lambda *record: came.append(record), lambda since: b"log of ann", lambda peer: False)
    bob.open(lambda *record: came.append(record), lambda since: asked.append(since) or b"log of bob", lambda peer: False)
    signature = ann.sign(b"record")
    assert bob.verify(ann.me, b"record", signature)
    assert not bob.verify(bob.me, b"record", signature)
    ann.publish(b"record", signature)
    assert came == [(ann.me, b"record", signature)]
    assert (ann.counts["sent"], bob.counts["sent"]) == (1, 0)
    sha256 = ann.put(b"body")
    assert sha256 == hashlib.sha256(b"body").digest()
    assert bob.get(ann.me, sha256, 100, 10.0) == b"body"
    with pytest.raises(MessageError):
        bob.get(ann.me, bytes(32), 100, 10.0)
    assert ann.fetch_log(bob.me, 7) == b"log of bob"
    assert asked == [7]
    assert (ann.name(bob.me), ann.name("nobody")) == ("bob", "nobody")


def test_whoever_is_banned_is_left_out_and_can_still_be_asked(two):
    ann, bob = two
    ann.open(lambda *record: None, lambda since: b"", lambda peer: False)
    bob.open(lambda *record: None, lambda since: b"", lambda peer: peer == ann.me)
    assert ann.others() == [bob.me]
    assert bob.others() == []
    assert bob.get(ann.me, ann.put(b"evidence"), 100, 10.0) == b"evidence"


def test_before_it_is_open_and_after_it_is_closed_nothing_is_counted_or_handed_out(two):
    ann, bob = two
    assert ann.counts == {}
    ann.close()  # of a node that fails before it opens
    bob.open(lambda *record: None, lambda since: b"log", lambda peer: False)
    bob.close()
    with pytest.raises((MessageError, NetworkError)):
        ann.fetch_log(bob.me, 0)
    bob.close = lambda: None
