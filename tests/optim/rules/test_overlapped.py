"""Gossip with a lag against the formulas in float64 loops: every lag, fragments with partners of their own, partners that miss."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.optim import Alone, Faults, GASLoC, LocalSGD, NoLoCo, Simulation, Streaming, groups

EVERY, SEED = 6, 3
SIZES = {1: [5], 2: [3, 2], 4: [1, 1, 1, 2]}
"""Numbers of values of each parameter; each is a fragment."""
WEIGHTS = {"anna": 1.0, "bert": 2.0, "cleo": 0.75, "dora": 1.5}


class NoLoCoReference:
    """v <- a v + b mean(slow - fast) + c (slow - mean(slow)); slow <- slow - v. All as sent, but v."""

    def __init__(self, lr=1.0, momentum=0.3, pull=None, weights=None):
        self.lr, self.momentum, self.pull, self.weights = lr, momentum, lr if pull is None else pull, weights

    def first(self, slow):
        return np.zeros_like(slow)

    def new(self, me, group, slow, fast, memory):
        shares = [1.0 if self.weights is None else self.weights[peer] for peer in group]
        gradient = np.average([slow[peer] - fast[peer] for peer in group], axis=0, weights=shares)
        apart = slow[me] - np.mean([slow[peer] for peer in group], axis=0)
        memory[:] = self.momentum * memory + self.lr * gradient + self.pull * apart
        return slow[me] - memory


class LocalReference:
    """slow <- mean(fast as sent)."""

    def first(self, slow):
        return slow

    def new(self, me, group, slow, fast, memory):
        return np.mean([fast[peer] for peer in group], axis=0)


class GASLoCReference:
    """u = slow + b (fast - slow) as sent; slow <- u - a (u - mean(u)) + c (u - u of the round before)."""

    def __init__(self, lr=0.7, momentum=0.5, mix=1.0):
        self.lr, self.momentum, self.mix = lr, momentum, mix

    def first(self, slow):
        return slow.copy()

    def new(self, me, group, slow, fast, memory):
        u = {peer: slow[peer] + self.lr * (fast[peer] - slow[peer]) for peer in group}
        found = u[me] - self.mix * (u[me] - np.mean(list(u.values()), axis=0)) + self.momentum * (u[me] - memory)
        memory[:] = u[me]
        return found


def parts_of(count):
    edges = np.cumsum([0, *SIZES[count]])
    return [slice(first, last) for first, last in itertools.pairwise(edges)]


def expected(lab, reference, peers, steps, count, lag, *, every=EVERY, lost=(), finish=False):
    """Return {peer: (slow, fast) after each step}: fast <- fast + (slow - fast as sent) when a mean is applied."""
    parts, sent_at = parts_of(count), [(number + 1) * every // count for number in range(count)]
    slow = {peer: lab.own_start(peer) for peer in peers}
    fast = {peer: lab.own_start(peer) for peer in peers}
    memory = {peer: reference.first(lab.own_start(peer)) for peer in peers}
    path, under_way, round = {peer: [] for peer in peers}, [], 0

    def apply(number, sent_round, sent_slow, sent_fast):
        part = parts[number]
        for group in groups(SEED, sent_round, peers, 2):
            together = not any((peer, sent_round) in lost for peer in group)
            for peer in group:
                new = reference.new(peer, group if together else (peer,), sent_slow, sent_fast, memory[peer][part])
                fast[peer][part] += new - sent_fast[peer]
                slow[peer][part] = new

    for step in range(1, steps + 1):
        for peer in peers:
            fast[peer] = lab.trained(peer, fast[peer], 1)
        for number, first in enumerate(sent_at):
            if (step - first) % every == 0 and step >= first:
                own = [{peer: values[peer][parts[number]].copy() for peer in peers} for values in (slow, fast)]
                under_way.append((step + lag, number, round, *own))
                round += 1
        for due in [due for due in under_way if due[0] == step or (finish and step == steps)]:
            under_way.remove(due)
            apply(*due[1:])
        for peer in peers:
            path[peer].append((slow[peer].copy(), fast[peer].copy()))
    return path


def found(lab, method, peers, steps, count, lag, *, every=EVERY, lost=(), finish=False, **options):
    """Return the same of the optimizer. All take each step at the same time, however long one has waited before."""

    def peer(exchange):
        first = torch.tensor(lab.own_start(exchange.peer), dtype=torch.float32)
        weights = [torch.nn.Parameter(part.clone()) for part in first.split(SIZES[count])]
        more = {name: value(exchange.peer) if callable(value) else value for name, value in options.items()}
        fragments = [[weight] for weight in weights] if count > 1 else 1
        opt = method(torch.optim.SGD(weights, lr=lab.RATE), exchange, every=every, fragments=fragments, lag=lag, **more)
        path = []
        for step in range(steps):
            exchange.sleep(100.0 * (step + 1) - exchange.simulation.now)
            opt.zero_grad()
            lab.least_squares(exchange.peer, weights).backward()
            opt.step()
            if finish and step == steps - 1:
                opt.finish()
            path.append((torch.cat(opt.slow).double().numpy(), torch.cat(weights).detach().double().numpy()))
        return path

    faults = Faults(drop=lambda peer, key: (peer, key.round) in lost)
    return Simulation(peers, size=2, seed=SEED, faults=faults).run(peer)


def check(lab, method, reference, peers, steps, count, lag, *, every=EVERY, lost=(), finish=False, **options):
    there = expected(lab, reference, peers, steps, count, lag, every=every, lost=lost, finish=finish)
    here = found(lab, method, peers, steps, count, lag, every=every, lost=lost, finish=finish, **options)
    for peer in peers:
        lab.close(np.array(here[peer]), np.array(there[peer]))


LOST = {("bert", 2), ("dora", 5), ("anna", 6)}


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("lag", range(EVERY))
def test_noloco_at_every_lag_is_the_formula(lab, lag, count):
    check(lab, NoLoCo, NoLoCoReference(), lab.PEERS, 5 * EVERY, count, lag, lost=LOST)


@pytest.mark.parametrize("peers", [["anna", "bert"], ["anna", "bert", "cleo"]], ids=["a pair", "an odd one"])
@pytest.mark.parametrize("lag", [1, 4])
def test_two_peers_and_an_odd_one(lab, lag, peers):
    check(lab, NoLoCo, NoLoCoReference(), peers, 5 * EVERY, 2, lag, lost=LOST)


FORMS = [{"pull": 0.3}, {"lr": 0.4, "momentum": 0.2, "pull": 1.1}, {"momentum": 0.0}, {"lr": 0.7, "momentum": 0.5}]


@pytest.mark.parametrize("knobs", FORMS, ids=str)
@pytest.mark.parametrize("lag", [2, 5])
def test_both_forms_of_noloco_keep_what_was_learnt_since(lab, lag, knobs):
    check(lab, NoLoCo, NoLoCoReference(**knobs), lab.PEERS, 5 * EVERY, 2, lag, lost=LOST, **knobs)


@pytest.mark.parametrize("lag", [1, 3])
def test_weights_count_in_the_pseudo_gradients_alone_with_a_lag_too(lab, lag):
    reference = NoLoCoReference(weights=WEIGHTS)
    check(lab, NoLoCo, reference, lab.PEERS, 5 * EVERY, 2, lag, lost=LOST, weight=lambda peer: lambda *_: WEIGHTS[peer])


@pytest.mark.parametrize("lag", range(EVERY))
def test_local_sgd_is_the_formula(lab, lag):
    check(lab, LocalSGD, LocalReference(), lab.PEERS, 5 * EVERY, 2, lag, lost=LOST)


@pytest.mark.parametrize("knobs", [{}, {"lr": 0.4, "momentum": 0.2, "mix": 0.6}, {"lr": 0.0}], ids=str)
@pytest.mark.parametrize("lag", [0, 1, 3, 5])
def test_gasloc_is_the_formula(lab, lag, knobs):
    check(lab, GASLoC, GASLoCReference(**knobs), lab.PEERS, 5 * EVERY, 2, lag, lost=LOST, **knobs)


@pytest.mark.parametrize(
    ("method", "reference"), [(NoLoCo, NoLoCoReference), (LocalSGD, LocalReference), (GASLoC, GASLoCReference)]
)
@settings(max_examples=15)
@given(every=st.integers(4, 9), steps=st.integers(1, 30), count=st.sampled_from([1, 2, 4]), data=st.data())
def test_after_finish_everything_sent_is_applied_whatever_the_lag(lab, method, reference, every, steps, count, data):
    lag = data.draw(st.integers(0, every - 1))
    check(lab, method, reference(), ["anna", "bert"], steps, count, lag, every=every, finish=True)


@pytest.mark.parametrize("make", [NoLoCo, lambda *a, **o: NoLoCo(*a, pull=0.3, **o), GASLoC])
def test_the_mean_over_all_peers_depends_neither_on_the_lag_nor_on_who_meets_whom(lab, make):
    """With constant gradients a peer's displacements are the same, whatever it has mixed in."""

    def last(size, lag):
        def peer(exchange):
            weight = torch.nn.Parameter(torch.tensor(lab.own_start(exchange.peer), dtype=torch.float32))
            opt = make(torch.optim.SGD([weight], lr=lab.RATE), exchange, every=4, fragments=1, lag=lag)
            for _ in range(20):
                opt.zero_grad()
                lab.linear(exchange.peer, [weight]).backward()
                opt.step()
                exchange.sleep(1.0)
            opt.finish()
            return opt.slow[0].double().numpy()

        return np.mean(list(Simulation(lab.PEERS, size=size, seed=SEED).run(peer).values()), axis=0)

    lab.close(last(2, 3), last(1, 0))
    lab.close(last(2, 0), last(4, 2))


@pytest.mark.parametrize("method", [NoLoCo, LocalSGD, GASLoC])
def test_alone_no_progress_is_lost(lab, method):
    """Without momentum and with rate 1 a peer alone goes on exactly where it is."""
    knobs = {} if method is LocalSGD else {"lr": 1.0, "momentum": 0.0}
    weight = torch.nn.Parameter(torch.tensor(lab.start(), dtype=torch.float32))
    opt = method(torch.optim.SGD([weight], lr=lab.RATE), Alone(), every=4, fragments=1, lag=3, **knobs)
    for _ in range(20):
        opt.zero_grad()
        lab.least_squares("anna", [weight]).backward()
        opt.step()
    lab.close(weight.detach().numpy(), lab.trained("anna", lab.start(), 20))


def test_the_defaults_by_lag():
    def schedule(every=50, **options):
        weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(6)]
        opt = NoLoCo(torch.optim.SGD(weights, lr=0.1), Alone(), every=every, **options)
        return opt.schedule, opt.fragments

    assert schedule(lag=0)[1] == 1
    assert schedule(lag=10) == (Streaming(50, 4, 10), 4)
    assert schedule(lag=1, every=3) == (Streaming(3, 3, 1), 3)
    assert schedule(lag=0, fragments=2) == (Streaming(50, 2, 0), 2)
    assert schedule(lag=2, fragments=1) == (Streaming(50, 1, 2), 1)
