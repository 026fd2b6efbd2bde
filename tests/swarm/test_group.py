"""A group's mean: who is in it, what counts, and what does not, over a network in memory."""

import pytest
import torch

from optim import FLOAT32, RoundKey
from optim.exchange import weighted_mean
from optim.pairing import order
from swarm.group import GroupExchange

SWARM, MODEL, SEED = "a" * 52, "0" * 64, 0


class Peer:
    def __init__(self, network, **options):
        self.network, self.host = network, network.host()
        self.id = self.host.peer_id
        self.sees, self.rounds = None, {}
        settings = {"wait": 3.0, "chunk_timeout": 0.5, "exchange_timeout": 5.0} | options
        self.exchange = GroupExchange(
            self.host, self.host.identity, swarm=SWARM, model=MODEL, seed=SEED, members=self.members, **settings
        )

    def members(self):
        ids = self.network.hosts if self.sees is None else self.sees
        return {peer: self.network.member(peer, self.rounds.get(peer, 0)) for peer in ids}

    def start(self, round=0, value=0.0, codec=FLOAT32, shape=(4,), fragment=0, weight=1.0):
        return self.exchange.start(RoundKey(SWARM, round, fragment), [torch.full(shape, value)], weight, codec)


def peers(network, count, **options):
    return [Peer(network, **options) for _ in range(count)]


def values(handles):
    means = [handle.result() for handle in handles]
    return [None if mean is None else mean.tensors[0].flatten()[0].item() for mean in means]


def test_four_peers_take_the_mean_of_all(network):
    four = peers(network, 4)
    for round in range(3):
        handles = [peer.start(round, float(number)) for number, peer in enumerate(four)]
        assert values(handles) == [1.5] * 4
    assert all(peer.exchange.next_round == 3 for peer in four)
    mean = handles[0].result()
    assert mean.members == tuple(sorted(peer.id for peer in four))
    assert mean.weight == 4.0
