"""A network in memory: real streams over socket pairs between fake hosts on one loop, and peers
that can be cut off at will.
"""

import pytest

from shoal.optim.exchange.pairing import order
from tests.support.fake_network import GroupPeer, Network
from tests.support.waiting import until


@pytest.fixture
def network():
    made = Network()
    yield made
    made.close()


class School:
    """Makes peers with group exchanges, and looks at what they got."""

    def __init__(self, network):
        self.network = network

    def peers(self, count, **options):
        return [GroupPeer(self.network, **options) for _ in range(count)]

    def ranked(self, peers, round=0):
        """Return the peers in the order of the round: its leader first."""
        by_id = {peer.id: peer for peer in peers}
        return [by_id[peer] for peer in order(0, round, by_id)]

    def values(self, handles):
        """Return the mean of each, of which all values are equal; None where there is none."""
        means = [handle.result() for handle in handles]
        assert all(mean is None or len(mean.tensors[0].unique()) == 1 for mean in means)
        return [None if mean is None else mean.tensors[0].flatten()[0].item() for mean in means]

    def until(self, condition):
        until(condition)


@pytest.fixture
def school(network):
    return School(network)
