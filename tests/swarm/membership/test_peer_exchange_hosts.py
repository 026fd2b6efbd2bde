"""Peer exchange between real hosts: a swarm outlives its bootstrap peer, and a node that reads
nothing in the DHT has members.
"""

import pytest

from shoal.swarm.identity import Identity
from shoal.swarm.membership import peer_exchange
from shoal.swarm.membership.peer_exchange import PeerExchange
from tests.support.directory_hosts import Node
from tests.support.records import SWARM
from tests.support.waiting import until


async def nothing(key):
    return {}


@pytest.fixture
def nodes(monkeypatch):
    monkeypatch.setattr(peer_exchange, "LOOK_S", 0.5)
    made = []

    def start(*bootstrap, captured=False, **options):
        """Start a node with peer exchange; one that is ``captured`` reads an empty DHT."""
        made.append(node := Node(bootstrap, must_join=bool(bootstrap), **options))
        if captured:
            node.host.get = nothing
        node.exchange = PeerExchange(node.host, node.directory, node.identity, SWARM)
        node.beside.append(node.exchange)
        node.say()
        return node

    yield start
    for node in made:
        node.close()


def ids(*nodes):
    return {node.peer_id for node in nodes}


@pytest.mark.ci
def test_node_without_directory_meets_all_again(nodes, tmp_path):
    """A late node that reads nothing meets all when the first is dead and again when it comes
    back.
    """
    first = nodes()
    dead = first.host.addresses()[0]
    one, two = nodes(dead), nodes(dead)
    until(lambda: ids(one, two) <= one.sees() & two.sees())
    until(lambda: two.peer_id in one.exchange.views.active)
    first.close()

    late = Identity.ephemeral()
    joined = nodes(
        dead, one.host.addresses()[0], identity=late, known=tmp_path / "peers.json", captured=True
    )
    until(lambda: ids(one, two, joined) <= joined.sees())
    until(lambda: joined.peer_id in two.sees())
    until(lambda: two.peer_id in joined.exchange.views.active)
    joined.close()

    back = nodes(dead, identity=late, known=tmp_path / "peers.json", captured=True)
    until(lambda: ids(one, two, back) <= back.sees())
