"""Exchanges in pairs on fake hosts, each with a membership of its own."""

from concurrent.futures import ThreadPoolExecutor

import torch

from shoal.optim import FLOAT32, RoundKey
from shoal.optim.exchange.base import Contribution
from shoal.swarm.exchange.context import PeerContext
from shoal.swarm.exchange.pair.exchange import PairExchange
from shoal.swarm.exchange.timeouts import ExchangeTimeouts

SWARM, MODEL, SEED = "a" * 52, "0" * 64, 0

# a wait that no test sits out: what ends in half of it did not wait, however busy the machine
LONG = 60.0


class Peer:
    """An exchange on a fake host, with a membership of its own."""

    def __init__(
        self, network, model=MODEL, swarm=SWARM, wait=LONG, chunk=5.0, limit=20.0, **options
    ):
        self.network, self.host = network, network.host()
        self.id = self.host.peer_id
        self.model, self.sees, self.looked, self.gone, self.rounds, self.banned = (
            model,
            None,
            0,
            {},
            {},
            set(),
        )
        barred = lambda peer: peer in self.banned  # noqa: E731
        context = PeerContext(
            self.host, self.host.identity, swarm, model, SEED, self.members, self.look, barred
        )
        self.exchange = PairExchange(
            context, ExchangeTimeouts(wait, chunk, limit), departed=lambda: self.gone, **options
        )

    def look(self):
        self.looked += 1

    def members(self):
        ids = [
            peer
            for peer in (self.network.hosts if self.sees is None else self.sees)
            if peer not in self.banned
        ]
        return {
            peer: self.network.member(peer, self.rounds.get(peer, 0), self.model) for peer in ids
        }

    def start(self, round=0, value=0.0, codec=FLOAT32, shape=(4,), run=SWARM):
        return self.exchange.start(
            Contribution(RoundKey(run, round), [torch.full(shape, value)], 1.0, codec)
        )


def value(mean):
    return None if mean is None else mean.tensors[0][0].item()


def at_once(train, peers):
    """Let all peers train, each in a thread of its own, to their end."""
    with ThreadPoolExecutor(len(peers)) as pool:
        list(pool.map(train, peers))
