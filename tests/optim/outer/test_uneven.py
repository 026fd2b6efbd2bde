"""Peers of different speed and weight: the mean is conserved, nobody waits long, and all reach the right optimum."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.optim import (
    Alone,
    DiLoCo,
    Every,
    GASLoC,
    GASLoCRule,
    LocalSGD,
    NoLoCo,
    NoLoCoRule,
    RoundContext,
    RoundKey,
    Seconds,
    Simulation,
    StreamingDiLoCo,
    Tokens,
    by_rate,
    by_tokens,
    codec_named,
    groups,
    weighted_mean,
)
from shoal.optim.exchange.base import counted_weights

SPEEDS = {"anna": 1, "bert": 3, "cleo": 10}  # a step of anna's takes ten times as long as one of cleo's
STEP_S = {peer: 7.5 / speed for peer, speed in SPEEDS.items()}


# -- the mean is conserved -----------------------------------------------------------------------------------------------


@st.composite
def swarms(draw):
    count = draw(st.integers(2, 6))
    size = draw(st.integers(2, count))
    weights = draw(st.lists(st.lists(st.floats(0.01, 1e6), min_size=count, max_size=count), min_size=1, max_size=5))
    return count, size, weights, draw(st.integers(0, 2**31))


def one_round(rule, slow, states, weights, met, moved):
    """Apply ``rule`` among the groups ``met``; return the sum over the peers of their group's weighted mean of ``moved``."""
    fast, key = [[s[0] - m] for s, m in zip(slow, moved, strict=True)], RoundKey("run", 0)
    total = torch.zeros(4, dtype=torch.float64)
    for group in met:
        members = [int(name) for name in group]
        sent = {i: rule.contribution(slow[i], fast[i], states[i], RoundContext(key, weights[i], weights[i])) for i in members}
        sent = {i: [tensor.clone() for tensor in tensors] for i, tensors in sent.items()}
        for i in members:
            parts = [(str(j), weights[j], [tensor.clone() for tensor in sent[j]]) for j in members]
            mean = weighted_mean(parts, rule.even(len(sent[i])))
            rule.apply(slow[i], fast[i], mean.tensors, states[i], RoundContext(key, weights[i], mean.weight, len(members)))
            assert torch.equal(fast[i][0], slow[i][0])
            counted = dict(zip(members, counted_weights([weights[j] for j in members])[0], strict=True))
            total += sum(counted[j] * moved[j] for j in members) / sum(counted.values())
    return total


@settings(max_examples=60, deadline=None)
@given(swarms(), st.floats(0.1, 1.5), st.floats(0, 0.9), st.one_of(st.none(), st.floats(0, 0.3)))
def test_the_sum_of_slow_weights_changes_by_the_weighted_pseudo_gradients_alone(swarm, lr, momentum, pull):
    count, size, all_weights, seed = swarm
    rule = NoLoCoRule(lr, momentum, 0.0 if pull is None else pull, weighted=True)
    generator = torch.Generator().manual_seed(seed)
    slow = [[torch.randn(4, dtype=torch.float64, generator=generator)] for _ in range(count)]
    states = [rule.initial(s) for s in slow]
    velocity = torch.zeros(4, dtype=torch.float64)
    for round, weights in enumerate(all_weights):
        moved = [torch.randn(4, dtype=torch.float64, generator=generator) for _ in range(count)]
        met = groups(seed, round, [str(i) for i in range(count)], size)
        before = sum(s[0].clone() for s in slow)
        # Heavy ball on the sum of the groups' weighted means, whatever the pull.
        velocity = momentum * velocity + lr * one_round(rule, slow, states, weights, met, moved)
        assert torch.allclose(sum(s[0] for s in slow), before - velocity, rtol=0, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(swarms(), st.floats(0, 1))
def test_gasloc_conserves_it_too_where_peers_count_differently(swarm, mix):
    count, size, all_weights, seed = swarm
    rule = GASLoCRule(lr=0.7, momentum=0.0, mix=mix)
    generator = torch.Generator().manual_seed(seed)
    slow = [[torch.randn(4, dtype=torch.float64, generator=generator)] for _ in range(count)]
    moved = [torch.randn(4, dtype=torch.float64, generator=generator) for _ in range(count)]
    before = sum(s[0].clone() for s in slow)
    met = groups(seed, 0, [str(i) for i in range(count)], size)
    one_round(rule, slow, [rule.initial(s) for s in slow], all_weights[0], met, moved)
    assert torch.allclose(sum(s[0] for s in slow), before - 0.7 * sum(moved), rtol=0, atol=1e-9)


def test_without_a_partner_the_weighted_form_is_the_unweighted_one_bit_by_bit(lab):
    def path(**options):
        return lab.run(NoLoCo, 20, ["anna"], every=5, pull=0.3, **options, lag=0)["anna"].slow

    assert np.array_equal(path(), path(weight=lambda peer, _: 3.0))


@pytest.mark.parametrize("method", [partial(NoLoCo, lag=0), partial(LocalSGD, lag=0)])
def test_equal_weights_in_other_units_change_nothing(lab, method):
    plain = lab.run(method, 40, size=2, begin=lab.own_start, every=5)
    thrice = lab.run(method, 40, size=2, begin=lab.own_start, every=5, weight=lambda peer, _: 3.0)
    for peer in lab.PEERS:
        lab.close(thrice[peer].slow, plain[peer].slow)


def test_local_sgd_weighs_what_was_learnt_and_not_where_a_peer_began(lab):
    weights = dict(zip(lab.PEERS, (1.0, 2.0, 3.0, 4.0), strict=True))
    found = lab.run(LocalSGD, 5, size=2, begin=lab.own_start, every=5, weight=lambda peer, _: weights[peer], lag=0)
    for a, b in groups(0, 0, lab.PEERS):
        first = {peer: lab.own_start(peer) for peer in (a, b)}
        learnt = sum(weights[p] * (lab.trained(p, first[p], 5) - first[p]) for p in (a, b)) / (weights[a] + weights[b])
        for peer in (a, b):
            lab.close(found[peer].slow[-1], (first[a] + first[b]) / 2 + learnt)


@pytest.mark.parametrize("method", [partial(NoLoCo, lag=0), partial(LocalSGD, lag=0), partial(GASLoC, lag=0)])
def test_what_is_sent_holds_no_weight_so_that_float16_can_hold_it(lab, method):
    """Model weights divided by tokens would be 0 in float16."""
    options = {"size": 2, "begin": lab.own_start, "every": 5, "codec": codec_named("float16")}
    plain = lab.run(method, 20, **options)
    heavy = lab.run(method, 20, **options, weight=lambda peer, _: 1e9)
    for peer in lab.PEERS:
        assert np.allclose(heavy[peer].slow, plain[peer].slow, atol=5e-3)


# -- rounds of seconds ---------------------------------------------------------------------------------------------------


def uneven(method, seconds, rounds, *, size=3, late=None, **options):
    """Train the peers to the end of ``rounds``; {peer: (infos, waits, inner steps in each round, slow weights)}."""
    optimum = {"anna": 1.0, "bert": -2.0, "cleo": 4.0}

    def peer(exchange):
        name = exchange.peer
        weight = torch.nn.Parameter(torch.tensor([0.5], dtype=torch.float64))
        other = torch.nn.Parameter(torch.tensor([0.5], dtype=torch.float64))
        infos, waits, made, last = [], [], [], 0

        def clock():
            return exchange.simulation.now

        def record(info):
            infos.append(info)
            made.append(opt.steps)

        own = {**options, "fragments": [[weight], [other]]} if "fragments" in options else options
        exchange.sleep((late or {}).get(name, 0.0))
        inner = torch.optim.SGD([weight, other], lr=0.05)
        opt = method(inner, exchange, length=Seconds(seconds, clock), on_round=record, **own)
        while len(infos) < rounds:
            exchange.sleep(STEP_S[name])
            opt.zero_grad()
            ((weight - optimum[name]).square() / 2 + (other - optimum[name]).square() / 2).sum().backward()
            opt.count(1)
            before, last = exchange.simulation.now, len(infos)
            opt.step()
            if len(infos) > last:
                waits.append(exchange.simulation.now - before)
        return infos, waits, np.diff([0, *made]), [float(s) for s in torch.cat(opt.slow)]

    return Simulation(list(SPEEDS), size=size, wait=1000.0).run(peer)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("seconds", [75.0, 80.0, 101.3])
@pytest.mark.parametrize("late", [{}, {"bert": 33.0}, {"cleo": 1.7, "anna": 12.0}])
def test_nobody_waits_longer_than_one_step_of_the_slowest_and_rounds_stay_aligned(size, seconds, late):
    found = uneven(partial(NoLoCo, lag=0), seconds, 12, size=size, late=late, weight=by_tokens, every=25)
    for peer, (infos, waits, made, _) in found.items():
        assert [info.key.round for info in infos] == list(range(12))
        # A joiner's first round may begin in the middle of the others'.
        assert max(waits[1:]) <= STEP_S["anna"] * (1 + 1e-9)
        expected = seconds / STEP_S[peer]
        assert all(abs(count - expected) <= 2 + STEP_S["anna"] / STEP_S[peer] for count in made[2:])
    for round in range(12):
        members = {peer: infos[round].members for peer, (infos, *_) in found.items()}
        assert sum(m == () for m in members.values()) == (1 if size == 2 else 0)
        assert all(members[other] == met for met in members.values() for other in met)


def test_rounds_of_steps_wait_for_the_slowest_instead():
    """The reason for rounds of seconds: with equal steps for all, the quick peer waits most of the time."""

    def peer(exchange):
        weight = torch.nn.Parameter(torch.ones(1))
        opt = DiLoCo(torch.optim.SGD([weight], lr=0.1), exchange, every=10)
        waited = 0.0
        for _ in range(100):
            exchange.sleep(STEP_S[exchange.peer])
            weight.grad = torch.ones(1)
            before = exchange.simulation.now
            opt.step()
            waited += exchange.simulation.now - before
        return waited / exchange.simulation.now

    idle = Simulation(list(SPEEDS), size=3, wait=1000.0).run(peer)
    assert idle["cleo"] == pytest.approx(0.9, abs=0.01)


@pytest.mark.parametrize(
    ("method", "options"),
    [(partial(NoLoCo, lag=0), {"every": 20}), (DiLoCo, {"every": 20, "momentum": 0.5}), (partial(LocalSGD, lag=0), {"every": 20})],
)
def test_they_reach_the_optimum_of_the_weighted_objective(method, options):
    """Quadratics with one optimum each; the displacement of a round counts by its tokens."""
    found = uneven(method, 75.0, 60, weight=by_tokens, **options)
    made = {"anna": 10, "bert": 30, "cleo": 100}  # inner steps, and tokens, in each round
    optimum = {"anna": 1.0, "bert": -2.0, "cleo": 4.0}
    for peer, (_, _, steps, _) in found.items():
        assert set(steps[1:]) == {made[peer]}
    # n steps of gradient descent cover 1 - (1 - lr)^n of the way to the own optimum: at rest these ways balance.
    force = {peer: n * (1 - 0.95**n) for peer, n in made.items()}
    expected = sum(force[p] * optimum[p] for p in made) / sum(force.values())
    for _, _, _, slow in found.values():
        assert slow == pytest.approx([expected] * 2, abs=1e-6)


def test_without_weights_the_optimum_is_another_one():
    found = uneven(DiLoCo, 75.0, 60, every=20, momentum=0.5)
    force = {"anna": 1 - 0.95**10, "bert": 1 - 0.95**30, "cleo": 1 - 0.95**100}
    expected = (force["anna"] - 2 * force["bert"] + 4 * force["cleo"]) / sum(force.values())
    assert found["anna"][3] == pytest.approx([expected] * 2, abs=1e-6)


def test_fragments_of_uneven_peers_meet_in_the_same_rounds():
    found = uneven(StreamingDiLoCo, 75.0, 24, every=20, fragments=2, lag=3, mix=0.0, lr=0.7, momentum=0.5, weight=by_rate)
    for infos, waits, _, _ in found.values():
        assert [(info.key.round, info.key.fragment) for info in infos] == [(round, round % 2) for round in range(24)]
        assert all(len(info.members) == 3 for info in infos)
        assert max(waits[1:]) <= STEP_S["anna"] * (1 + 1e-9)
    slow = [values for *_, values in found.values()]
    assert slow[0] == pytest.approx(slow[1], abs=1e-12)
    assert slow[0] == pytest.approx(slow[2], abs=1e-12)


def test_a_peer_that_slept_through_rounds_joins_the_one_that_the_others_are_in():
    """After its sleep it is given the swarm's round, as in a node, and from then on ends its rounds with the others."""
    names = ["anna", "bert"]

    def peer(exchange):
        weight = torch.nn.Parameter(torch.ones(1))
        members = []
        opt = NoLoCo(
            torch.optim.SGD([weight], lr=0.1),
            exchange,
            length=Seconds(10.0, lambda: exchange.simulation.now),
            every=4,
            on_round=lambda info: members.append((info.key.round, len(info.members))),
            lag=0,
        )
        while opt.round < 12:
            exchange.sleep(0.5 if exchange.peer == "anna" else 1.25)
            if exchange.peer == "bert" and opt.round == 3:
                exchange.sleep(37.0)
                opt.round = 6
            weight.grad = torch.ones(1)
            opt.step()
        return members

    found = Simulation(names, wait=2.0).run(peer)
    assert [round for round, count in found["anna"] if count == 0] == [3, 4, 5]
    assert found["bert"] == [(round, 2) for round in (0, 1, 2, 6, 7, 8, 9, 10, 11)]


def test_rounds_of_tokens_have_as_many_tokens_for_peers_with_other_batches():
    batches = {"anna": 3, "bert": 16, "cleo": 7}

    def peer(exchange):
        weight = torch.nn.Parameter(torch.ones(1))
        counted = []
        opt = DiLoCo(
            torch.optim.SGD([weight], lr=0.1), exchange, length=Tokens(100), every=5, weight=by_tokens,
            on_round=lambda info: counted.append((opt.tokens, info.members)),
        )  # fmt: skip
        while len(counted) < 20:
            exchange.sleep(batches[exchange.peer] * 0.01)
            weight.grad = torch.ones(1)
            opt.count(batches[exchange.peer])
            opt.step()
        return counted

    for name, counted in Simulation(list(batches), size=3).run(peer).items():
        assert all(100 * n <= tokens < 100 * n + batches[name] for n, (tokens, _) in enumerate(counted, 1))
        assert {members for _, members in counted} == {tuple(sorted(batches))}


def test_a_schedule_of_one_position_has_rounds_of_seconds_too():
    infos = []
    clock = iter(np.arange(0.0, 100.0, 0.25))
    opt = NoLoCo(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), Alone(), every=1, on_round=infos.append,
                 length=Seconds(2.0, lambda: float(next(clock))), lag=0)  # fmt: skip
    for _ in range(40):
        opt.step()
    assert opt.schedule == Every(1)
    assert len(infos) in range(3, 6)
