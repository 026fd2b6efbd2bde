"""What exchanges in flight hold: what was sent once, what came once, and nothing once their means are applied."""

import gc
from functools import partial

import pytest
import torch

from shoal.optim import BFLOAT16, FLOAT32, NoLoCo, StreamingDiLoCo
from shoal.swarm.errors import NetworkError
from shoal.swarm.exchange.context import ExchangeTimeouts, PeerContext
from shoal.swarm.exchange.group.exchange import GroupExchange
from shoal.swarm.exchange.pair.transfer import PairTransfer
from tests.swarm.exchange.pair.test_fragments import Overlapping
from tests.swarm.exchange.pair.test_matchmaking import LONG, MODEL, SEED, SWARM, until, value

FRAGMENTS, VALUES = 4, 300_000  # a fragment's payload is larger than what is too small to be used again
OF_AN_EXCHANGE = ("PartnerContribution", "EncodedContribution", "ExchangeAttempt", "PairingAttempt", "Gathered")


@pytest.fixture
def uncollected():
    """What is in a ring of references stays, as it does for long in a node, where hardly any objects are made meanwhile."""
    gc.disable()
    gc.freeze()  # what is there already is not looked at
    yield
    gc.unfreeze()
    gc.enable()


def of_exchanges():
    return [held for held in gc.get_objects() if type(held).__name__ in OF_AN_EXCHANGE]


def storages():
    tensors = [held for held in gc.get_objects() if type(held) in (torch.Tensor, torch.nn.Parameter)]
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return {place: nbytes for place, nbytes in found.items() if nbytes >= VALUES}


@pytest.mark.parametrize("ends", ["met", "broken", "alone"])
def test_contributions_are_gone_with_their_mean(network, uncollected, monkeypatch, ends):
    a, b = (Overlapping(network, wait=LONG if ends == "met" else 0.1, overlap=True) for _ in range(2))

    async def broken(self, stream, *args):
        stream.abort()
        raise NetworkError("cut.", "broken")

    if ends == "broken":
        monkeypatch.setattr(PairTransfer, "_swap", broken)
    for first in range(0, 3 * FRAGMENTS, FRAGMENTS):
        senders = [(a, 1.0)] if ends == "alone" else [(a, 1.0), (b, 3.0)]
        handles = [peer.send(round, sent) for peer, sent in senders for round in range(first, first + FRAGMENTS)]
        assert {value(handle.result()) for handle in handles} == {2.0 if ends == "met" else None}
        del handles
    until(lambda: not of_exchanges())  # the last coroutines have still to end


def trained(method, exchange):
    weights = [torch.nn.Parameter(torch.zeros(VALUES)) for _ in range(FRAGMENTS)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    return method(torch.optim.SGD(weights, lr=0.1), exchange, every=2 * FRAGMENTS, lag=2 * FRAGMENTS - 1, run=SWARM)


def in_groups(network, peer):
    context = PeerContext(peer.host, peer.host.identity, SWARM, MODEL, SEED, peer.members, peer.look)
    return GroupExchange(context, ExchangeTimeouts(LONG, 5.0, 20.0), fragments=FRAGMENTS)


@pytest.mark.parametrize(
    ("method", "codec"),
    [(NoLoCo, FLOAT32), (NoLoCo, BFLOAT16), (StreamingDiLoCo, FLOAT32)],
    ids=["noloco", "noloco-bfloat16", "streaming"],
)
def test_all_fragments_in_flight_hold_what_was_sent_and_what_came_once(network, uncollected, method, codec):
    peers = [Overlapping(network, FRAGMENTS, wait=LONG, overlap=True) for _ in range(2)]
    exchanges = [peer.exchange if method is NoLoCo else in_groups(network, peer) for peer in peers]
    made = partial(method, fragments=FRAGMENTS, codec=codec)
    optimizers = [trained(made, exchange) for exchange in exchanges]

    def held():
        return sum(storages().values()) / (4 * VALUES * FRAGMENTS * len(optimizers))

    alone = held()
    assert alone == 4.0  # weights, gradients, slow weights, momentum
    for _ in range(3):
        for _ in range(2 * FRAGMENTS):
            for optimizer in optimizers:
                optimizer.step()
        assert [len(list(optimizer._in_flight)) for optimizer in optimizers] == [FRAGMENTS, FRAGMENTS]
        for optimizer in optimizers:
            assert all(pending.result() is not None for pending in optimizer._in_flight)
        until(lambda: held() == alone + 2.0)  # what was sent, and what came, in which the mean is computed
    for optimizer in optimizers:
        optimizer.finish()
    until(lambda: held() == alone)
