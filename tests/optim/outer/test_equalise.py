"""Equal slow weights after rounds that some peers, or all, missed."""

import pytest
import torch

from shoal.optim import METHODS, Faults, Simulation, weighted_mean
from shoal.optim.outer.optimizer import sources

PEERS = ["p0", "p1", "p2", "p3"]
ANCHORED = ["diloco", "diloco-hb", "streaming", "decoupled", "co2", "sparseloco"]
REST = 40


def train(exchange, method, steps=120, rest=False, seed=0, rounds=None):
    """Train on the peer's own data, with ``rest`` not in the last steps. Return what all peers should hold alike."""
    generator = torch.Generator().manual_seed(int(exchange.peer[1:]))
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))
    layers = {"fragments": [list(layer.parameters()) for layer in model]} if method in ("streaming", "decoupled") else {}
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    note = (lambda info: None) if rounds is None else lambda info: rounds.append((exchange.peer, info.key.round, info.members))
    opt = METHODS[method].make(inner, exchange, every=10, on_round=note, **layers)
    for step in range(steps):
        opt.zero_grad()
        opt.count(5)
        x = torch.randn(5, 7, generator=generator)
        (model(x) - x[:, :3]).square().mean().backward()
        if rest and step >= REST:
            opt.zero_grad()
        opt.step()
        exchange.sleep(0.1)
    opt.finish()
    return [tensor.clone() for tensors in (opt.slow, *opt.shared.values()) for tensor in tensors]


def spread(found):
    first = next(iter(found.values()))
    return max(float((one - other).abs().max()) for held in found.values() for one, other in zip(held, first, strict=True))


@pytest.mark.parametrize("method", ANCHORED)
def test_after_a_round_that_failed_for_all_everybody_holds_the_same_again(method):
    faults = Faults(drop=lambda peer, key: peer == "p1" and key.round == 3)
    found = Simulation(PEERS, size=4, faults=faults).run(lambda exchange: train(exchange, method))
    assert spread(found) == 0.0


class Doubts:
    """Screen that refuses p1 in round 3."""

    gathers = False

    def problem(self, key, own, peer, theirs):
        return "it is p1" if peer == "p1" and key.round == 3 else None

    def mean(self, me, fragment, contributions, even=0):
        return weighted_mean(contributions, even)


@pytest.mark.parametrize("method", ANCHORED)
def test_a_peer_that_the_others_went_on_without_takes_over_what_they_hold(method):
    rounds = []
    simulation = Simulation(PEERS, size=4, screens={peer: Doubts() for peer in PEERS})
    found = simulation.run(lambda exchange: train(exchange, method, rounds=rounds))
    assert ("p0", 3, ("p0", "p2", "p3")) in rounds
    assert ("p1", 3, ()) in rounds
    assert spread(found) == 0.0


def test_a_failed_round_is_made_up_for_by_the_mean_of_what_each_did_alone():
    """DiLoCo is linear, so the mean of four lone outer steps is the outer step with the mean: nothing is lost."""

    def run(faults):
        return Simulation(PEERS, size=4, faults=faults).run(lambda exchange: train(exchange, "diloco", rest=True))

    failed, whole = run(Faults(drop=lambda peer, key: key.round == 3)), run(None)
    assert spread(failed) == 0.0
    for one, other in zip(failed["p0"], whole["p0"], strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-6)


def test_weights_that_began_differently_are_equal_after_the_first_round():
    found = Simulation(PEERS, size=4).run(lambda exchange: train(exchange, "diloco", steps=20, seed=int(exchange.peer[1:])))
    assert spread(found) == 0.0


@pytest.mark.parametrize("size", [2, 3])
def test_groups_that_are_not_everybody_differ_by_design_and_are_left_alone(size):
    simulation = Simulation(PEERS, size=size)
    found = simulation.run(lambda exchange: train(exchange, "diloco", steps=30))
    assert spread(found) > 0
    assert not simulation._among


def test_the_largest_part_is_right_and_among_equals_the_mean_of_them():
    a, near, b, c = (1.0, 2.0), (1.0, 2.0 + 1e-7), (1.0, 2.1), (3.0, 2.0)
    assert sources({"p0": a, "p1": near}) == []
    assert sources({"p0": b, "p1": a, "p2": near}) == ["p1"]
    assert sources({"p0": a, "p1": b, "p2": c}) == ["p0", "p1", "p2"]
    assert sources({"p0": a, "p1": b, "p2": c}, first=True) == ["p0"]
    assert sources({"p0": a, "p1": b, "p2": near, "p3": b}) == ["p0", "p1"]
    assert sources({"p0": c, "p1": a, "p2": near}, first=True) == ["p1"]
