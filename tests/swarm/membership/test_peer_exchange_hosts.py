"""Peer exchange between real hosts: a swarm outlives its bootstrap peer, and a node that reads nothing in the DHT has members."""

import pytest

from shoal.swarm.identity import Identity
from shoal.swarm.membership import peer_exchange
from shoal.swarm.membership.dht import MemberValidator
from shoal.swarm.membership.directory import Directory
from shoal.swarm.membership.peer_exchange import PeerExchange
from shoal.swarm.p2p.host import Host
from tests.clocks import until
from tests.swarm.membership.conftest import ABOUT

SWARM = "a" * 52


class Node:
    """A host with a directory and peer exchange; one that is ``captured`` reads an empty DHT."""

    def __init__(self, identity, bootstrap, known=None, captured=False):
        self.peer_id = identity.peer_id
        self.host = Host.start(
            identity, bootstrap=bootstrap, validator=MemberValidator(SWARM), swarm=SWARM, must_join=bool(bootstrap), known=known,
            timeout=60.0,
        )  # fmt: skip
        if captured:
            self.host.get = self.nothing
        self.directory = Directory(self.host, identity, SWARM, ttl=20.0, period=1.0)
        self.exchange = PeerExchange(self.host, self.directory, identity, SWARM)
        self.directory.announce(**ABOUT)

    async def nothing(self, key):
        return {}

    def sees(self):
        return set(self.directory.members())

    def close(self):
        self.exchange.close()
        self.directory.close()
        self.host.close()


@pytest.fixture
def nodes(monkeypatch):
    monkeypatch.setattr(peer_exchange, "LOOK", 0.5)
    made = []

    def start(*bootstrap, identity=None, **options):
        made.append(Node(identity or Identity.ephemeral(), bootstrap, **options))
        return made[-1]

    yield start
    for node in made:
        node.close()


def ids(*nodes):
    return {node.peer_id for node in nodes}


def test_a_late_node_that_reads_nothing_meets_all_when_the_first_is_dead_and_again_when_it_comes_back(nodes, tmp_path):
    first = nodes()
    dead = first.host.addresses()[0]
    one, two = nodes(dead), nodes(dead)
    until(lambda: ids(one, two) <= one.sees() & two.sees())
    until(lambda: two.peer_id in one.exchange.views.active)
    first.close()

    late = Identity.ephemeral()
    joined = nodes(dead, one.host.addresses()[0], identity=late, known=tmp_path / "peers.json", captured=True)
    until(lambda: ids(one, two, joined) <= joined.sees())
    until(lambda: joined.peer_id in two.sees())
    until(lambda: two.peer_id in joined.exchange.views.active)
    joined.close()

    back = nodes(dead, identity=late, known=tmp_path / "peers.json", captured=True)
    until(lambda: ids(one, two, back) <= back.sees())
