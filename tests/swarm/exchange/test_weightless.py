"""Weight 0 over the network: who brings it takes part in the round and gets the mean, which is that of the others."""

import pytest
import torch

from shoal.optim import RoundKey
from shoal.optim.exchange.base import Contribution
from shoal.swarm.exchange.context import ExchangeTimeouts
from tests.swarm.conftest import SWARM, paired

CASES = {
    "one of two": ([0.0, 2.0], [5.0, 3.0], 3.0),
    "one of three": ([0.0, 1.0, 3.0], [100.0, 2.0, 6.0], 5.0),
    "one of four, all-reduced": ([1.0, 0.0, 1.0, 2.0], [4.0, 100.0, 8.0, 2.0], 4.0),
    "all of two": ([0.0, 0.0], [5.0, 3.0], 4.0),
    "all of four, all-reduced": ([0.0] * 4, [1.0, 2.0, 3.0, 6.0], 3.0),
}


@pytest.mark.parametrize("case", CASES)
def test_in_a_group_everybody_gets_the_mean_of_those_who_count(school, case):
    weights, values, mean = CASES[case]
    peers = school.peers(len(weights))
    handles = [peer.start(value=value, weight=weight) for peer, value, weight in zip(peers, values, weights, strict=True)]
    assert school.values(handles) == [pytest.approx(mean, abs=1e-6)] * len(peers)
    got = [handle.result() for handle in handles]
    counted = sum(weight > 0 for weight in weights) or len(weights)
    assert {(len(one.members), one.counted, one.weight) for one in got} == {(len(peers), counted, sum(weights) or len(weights))}


@pytest.mark.parametrize("case", ["one of two", "all of two"])
def test_with_a_partner_both_get_the_mean_of_those_who_count(school, network, case):
    weights, values, mean = CASES[case]
    exchanges = paired(network, len(weights), ExchangeTimeouts(20.0))
    tensors = [[torch.full((4,), value)] for value in values]
    key = RoundKey(SWARM, 0)
    handles = [
        exchange.start(Contribution(key, one, weight)) for exchange, one, weight in zip(exchanges, tensors, weights, strict=True)
    ]
    assert school.values(handles) == [mean, mean]
