"""A peer that missed a round adopts another's slow weights by fragments and then equals the others."""

import pytest
import torch
from torch import nn

from shoal.optim import CO2, Alone, DiLoCo, NoLoCo, Simulation, StreamingDiLoCo
from shoal.optim.exchange.base import Exchange, Handle
from shoal.optim.exchange.simulation import Faults

PEERS = ["a", "b", "c"]
MISSED = (2, 3)


class Blind(Exchange):
    """Exchange that does not compare what the peers hold, as a swarm's does not."""

    def __init__(self, exchange):
        self.start = exchange.start


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


METHODS = {
    "diloco": lambda inner, exchange, net: DiLoCo(inner, exchange, every=4),
    "streaming": lambda inner, exchange, net: StreamingDiLoCo(inner, exchange, every=8, fragments=2, lag=3, model=net),
    "co2": lambda inner, exchange, net: CO2(inner, exchange, every=4),
}


def train(make, steps, adopt_at=None):
    """Return {peer: (slow weights after each step, optimizer)}; rounds are missed, and from ``adopt_at`` on "c" adopts from "a"."""
    states = {}

    def peer(exchange):
        net = model()
        opt = make(torch.optim.SGD(net.parameters(), lr=0.05), Blind(exchange), net)
        data = torch.Generator().manual_seed(ord(exchange.peer))
        history, astray = [], set(range(opt.fragments))
        for step in range(1, steps + 1):
            net(torch.randn(5, 3, generator=data)).square().mean().backward()
            opt.step()
            opt.zero_grad()
            if exchange.peer == "a":
                states[step] = (
                    [t.clone() for t in opt.slow], opt.round, {n: [t.clone() for t in ts] for n, ts in opt.shared.items()},
                    list(opt.applied),
                )  # fmt: skip
            elif exchange.peer == "c" and adopt_at is not None and step >= adopt_at and astray:
                slow, round, shared, applied = states[step - 1]  # as old as what comes over a network
                assert round <= opt.round
                taken = opt.adopt(slow, round=opt.round, shared=shared, applied=applied)
                assert all(applied[p] >= 0 for p in taken)
                astray -= set(taken)
            history.append([t.clone() for t in opt.slow])
            exchange.sleep(1.0)
        return history, opt

    faults = Faults(drop=lambda name, key: name == "c" and key.round in MISSED)
    # In those rounds nobody gets a mean, so each goes its own way.
    return Simulation(PEERS, size=3, wait=0.5, faults=faults).run(peer)


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_without_the_weights_of_the_others_a_lost_round_is_apart_for_good(name):
    ends = train(METHODS[name], 64)
    assert not equal(ends["a"][0][-1], ends["c"][0][-1])


@pytest.mark.parametrize("late", range(20, 28))
@pytest.mark.parametrize("name", METHODS)
def test_taking_over_makes_equal_at_whatever_step_it_comes(name, late):
    ends = train(METHODS[name], 64, adopt_at=late)
    assert equal(ends["a"][0][-1], ends["c"][0][-1])
    assert equal(ends["a"][0][-9], ends["c"][0][-9])


def test_what_is_older_there_than_here_is_not_taken():
    net = model()
    opt = METHODS["streaming"](torch.optim.SGD(net.parameters(), lr=0.05), Alone(), net)
    opt.applied = [4, 7]
    before = [t.clone() for t in opt.slow]
    given = [torch.full_like(t, 9.0) for t in opt.slow]
    assert opt.adopt(given, round=8, applied=[6, 5]) == [0]
    assert opt.applied == [6, 7]
    assert equal(opt.slow_of(0), [torch.full_like(t, 9.0) for t in opt.slow_of(0)])
    kept = [index for index in range(len(before)) if torch.equal(opt.slow[index], before[index])]
    assert len(kept) == len(opt.slow_of(1))


@pytest.mark.parametrize(
    ("given", "reason"),
    [({"shared": {"other": []}}, "does not share"), ({"applied": [1, 2, 3]}, "in 3 fragments, this optimizer's in 1")],
)
def test_what_does_not_fit_changes_nothing(given, reason):
    net = model()
    opt = METHODS["diloco"](torch.optim.SGD(net.parameters(), lr=0.05), Alone(), net)
    before = [t.clone() for t in opt.slow]
    with pytest.raises(ValueError, match=reason):
        opt.adopt([torch.full_like(t, 9.0) for t in opt.slow], round=3, **given)
    assert equal(before, opt.slow)
    assert opt.round == 0


def test_what_is_dropped_is_given_up_in_the_exchange_too():
    """Else its partner would count a contribution that is sent again here. Of a fragment that stays, nothing is."""
    given_up = []

    class Waiting(Handle):
        def __init__(self, key):
            self.key = key

        def done(self):
            return False

        def result(self, deadline=None):
            raise AssertionError("it would be waited for")

        def close(self):
            given_up.append(self.key.round)

    exchange = Alone()
    exchange.start = lambda contribution: Waiting(contribution.key)
    net = model()
    opt = NoLoCo(torch.optim.SGD(net.parameters(), lr=0.05), exchange, every=4, fragments=2, lag=3, model=net)
    while opt.round < 2:
        opt.step()
    slow = [t.clone() for t in opt.slow]
    opt.adopt(slow, round=2, applied=[0, -1])
    assert given_up == [0]
    opt.adopt(slow, round=2, into_model=True)
    assert given_up == [0, 1]
