"""Peers of different speed and weight, that come late or miss rounds: what is conserved, who waits,
when all are equal again.
"""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shoal.optim import (
    CO2,
    METHODS,
    Alone,
    DiLoCo,
    Faults,
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
    method_named,
    weighted_mean,
)
from shoal.optim.exchange.base import Exchange, Handle
from shoal.optim.exchange.weighted_mean import counted_weights
from shoal.optim.methods import methods_of
from shoal.optim.outer.agreement import sources

SPEEDS = {
    "anna": 1,
    "bert": 3,
    "cleo": 10,
}  # a step of anna's takes ten times as long as one of cleo's
STEP_S = {peer: 7.5 / speed for peer, speed in SPEEDS.items()}
OPTIMUM = {"anna": 1.0, "bert": -2.0, "cleo": 4.0}


# -- the mean is conserved -------------------------------------------------------------------------


@st.composite
def swarms(draw):
    count = draw(st.integers(2, 6))
    size = draw(st.integers(2, count))
    weights = draw(
        st.lists(
            st.lists(st.floats(0.01, 1e6), min_size=count, max_size=count), min_size=1, max_size=5
        )
    )
    return count, size, weights, draw(st.integers(0, 2**31))


def one_round(rule, slow, states, weights, met, moved):
    """Apply ``rule`` among the groups ``met``; return the sum over the peers of their group's
    weighted mean of ``moved``.
    """
    fast, key = [[s[0] - m] for s, m in zip(slow, moved, strict=True)], RoundKey("run", 0)
    total = torch.zeros(4, dtype=torch.float64)
    for group in met:
        members = [int(name) for name in group]
        sent = {
            i: rule.contribution(
                slow[i], fast[i], states[i], RoundContext(key, weights[i], weights[i])
            )
            for i in members
        }
        sent = {i: [tensor.clone() for tensor in tensors] for i, tensors in sent.items()}
        for i in members:
            parts = [(str(j), weights[j], [tensor.clone() for tensor in sent[j]]) for j in members]
            mean = weighted_mean(parts, rule.unweighted_count(len(sent[i])))
            rule.apply(
                slow[i],
                fast[i],
                mean.tensors,
                states[i],
                RoundContext(key, weights[i], mean.weight, len(members)),
            )
            assert torch.equal(fast[i][0], slow[i][0])
            counted = dict(
                zip(members, counted_weights([weights[j] for j in members])[0], strict=True)
            )
            total += sum(counted[j] * moved[j] for j in members) / sum(counted.values())
    return total


@settings(max_examples=60)
@given(swarms(), st.floats(0.1, 1.5), st.floats(0, 0.9), st.one_of(st.none(), st.floats(0, 0.3)))
def test_weighted_gradients_move_the_sum_of_slow_weights(swarm, lr, momentum, pull):
    """The sum of slow weights changes by the weighted pseudo gradients alone."""
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


@settings(max_examples=40)
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


def test_alone_weighted_equals_unweighted(lab):
    """Without a partner the weighted form is the unweighted one bit by bit."""

    def path(**options):
        return lab.run(NoLoCo, 20, ["anna"], every=5, pull=0.3, **options, lag=0)["anna"].slow

    assert np.array_equal(path(), path(weight=lambda peer, _: 3.0))


@pytest.mark.parametrize(
    "method", [partial(NoLoCo, lag=0), partial(LocalSGD, lag=0), partial(GASLoC, lag=0)]
)
def test_sent_values_fit_float16_at_any_weight(lab, method):
    """Model weights divided by tokens would be 0 in float16."""
    options = {"size": 2, "begin": lab.own_start, "every": 5, "codec": codec_named("float16")}
    plain = lab.run(method, 20, **options)
    heavy = lab.run(method, 20, **options, weight=lambda peer, _: 1e9)
    for peer in lab.PEERS:
        assert np.allclose(heavy[peer].slow, plain[peer].slow, atol=5e-3)


# -- rounds of seconds -----------------------------------------------------------------------------


def uneven(method, seconds, rounds, *, size=3, late=None, **options):
    """Train the peers to the end of ``rounds``; {peer: (infos, waits, inner steps in each round,
    slow weights)}.
    """

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
            (
                (weight - OPTIMUM[name]).square() / 2 + (other - OPTIMUM[name]).square() / 2
            ).sum().backward()
            opt.count(1)
            before, last = exchange.simulation.now, len(infos)
            opt.step()
            if len(infos) > last:
                waits.append(exchange.simulation.now - before)
        return infos, waits, np.diff([0, *made]), [float(s) for s in torch.cat(opt.slow)]

    return Simulation(list(SPEEDS), size=size, wait=1000.0).run(peer)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("size", "seconds", "late"),
    [
        (2, 75.0, {}),
        (2, 80.0, {"cleo": 1.7, "anna": 12.0}),
        (2, 101.3, {"bert": 33.0}),
        (3, 75.0, {"cleo": 1.7, "anna": 12.0}),
        (3, 80.0, {"bert": 33.0}),
        (3, 101.3, {}),
    ],
)
def test_waits_are_at_most_one_slow_step(size, seconds, late):
    """Nobody waits longer than one step of the slowest and rounds stay aligned."""
    found = uneven(
        partial(NoLoCo, lag=0), seconds, 12, size=size, late=late, weight=by_tokens, every=25
    )
    for peer, (infos, waits, made, _) in found.items():
        assert [info.key.round for info in infos] == list(range(12))
        # A joiner's first round may begin in the middle of the others'.
        assert max(waits[1:]) <= STEP_S["anna"] * (1 + 1e-9)
        expected = seconds / STEP_S[peer]
        assert all(abs(count - expected) <= 2 + STEP_S["anna"] / STEP_S[peer] for count in made[2:])
    for round in range(12):
        members = {peer: infos[round].members for peer, (infos, *_) in found.items()}
        assert () not in members.values()
        assert all(peer in members[other] for peer, met in members.items() for other in met)
        # Of three peers one meets both others.
        assert sum(len(met) == 3 for met in members.values()) == (1 if size == 2 else 3)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("method", "options"),
    [
        (partial(NoLoCo, lag=0), {"weight": by_tokens}),
        (DiLoCo, {"momentum": 0.5, "weight": by_tokens}),
        (DiLoCo, {"momentum": 0.5}),
    ],
)
def test_weighted_objective_is_reached(method, options):
    """Quadratics with one optimum each; the displacement of a round counts by its tokens, or all
    count the same.
    """
    found = uneven(method, 75.0, 60, every=20, **options)
    made = {"anna": 10, "bert": 30, "cleo": 100}  # inner steps, and tokens, in each round
    for peer, (_, _, steps, _) in found.items():
        assert set(steps[1:]) == {made[peer]}
    # n steps of gradient descent cover 1 - (1 - lr)^n of the way to the own optimum: at rest these
    # ways balance.
    force = {peer: (n if "weight" in options else 1) * (1 - 0.95**n) for peer, n in made.items()}
    expected = sum(force[p] * OPTIMUM[p] for p in made) / sum(force.values())
    for _, _, _, slow in found.values():
        assert slow == pytest.approx([expected] * 2, abs=1e-6)


def test_fragments_of_uneven_peers_meet_in_the_same_rounds():
    found = uneven(
        StreamingDiLoCo,
        75.0,
        24,
        every=20,
        fragments=2,
        lag=3,
        mix=0.0,
        lr=0.7,
        momentum=0.5,
        weight=by_rate,
    )
    for infos, waits, _, _ in found.values():
        assert [(info.key.round, info.key.fragment) for info in infos] == [
            (round, round % 2) for round in range(24)
        ]
        assert all(len(info.members) == 3 for info in infos)
        assert max(waits[1:]) <= STEP_S["anna"] * (1 + 1e-9)
    slow = [values for *_, values in found.values()]
    assert slow[0] == pytest.approx(slow[1], abs=1e-12)
    assert slow[0] == pytest.approx(slow[2], abs=1e-12)


def test_sleeper_joins_the_current_round():
    """After its sleep it is given the swarm's round, as in a node, and from then on ends its rounds
    with the others.
    """
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


def test_token_rounds_are_equal_across_batches():
    """Rounds of tokens have as many tokens for peers with other batches."""
    batches = {"anna": 3, "bert": 16, "cleo": 7}

    def peer(exchange):
        weight = torch.nn.Parameter(torch.ones(1))
        counted = []
        opt = DiLoCo(
            torch.optim.SGD([weight], lr=0.1),
            exchange,
            length=Tokens(100),
            every=5,
            weight=by_tokens,
            on_round=lambda info: counted.append((opt.tokens, info.members)),
        )
        while len(counted) < 20:
            exchange.sleep(batches[exchange.peer] * 0.01)
            weight.grad = torch.ones(1)
            opt.count(batches[exchange.peer])
            opt.step()
        return counted

    for name, counted in Simulation(list(batches), size=3).run(peer).items():
        assert all(
            100 * n <= tokens < 100 * n + batches[name] for n, (tokens, _) in enumerate(counted, 1)
        )
        assert {members for _, members in counted} == {tuple(sorted(batches))}


WEIGHTED = pytest.mark.parametrize(
    "options", [{}, {"weight": by_tokens}], ids=["equal", "weighted"]
)
PAIRS, GROUPS = methods_of("pair"), ("diloco", "eager", "co2", "sparseloco")


def tensors(value):
    return [torch.full((3,), value)]


@pytest.mark.parametrize(
    ("stated", "values", "expected"),
    [((1.0, 0.0, 3.0), (4.0, 100.0, 8.0), (7.0, 4.0, 2)), ((0.0, 0.0), (4.0, 8.0), (6.0, 2.0, 2))],
)
def test_weightless_peer_is_not_in_the_mean(stated, values, expected):
    """A peer without weight takes part and is not in the mean unless all are without."""
    parts = [
        (peer, weight, tensors(value))
        for peer, weight, value in zip("abc", stated, values, strict=False)
    ]
    mean = weighted_mean(parts[::-1])
    assert torch.equal(mean.tensors[0], torch.full((3,), expected[0]))
    assert (mean.weight, mean.counted, mean.members) == (*expected[1:], tuple("abc"[: len(stated)]))


@pytest.mark.parametrize("weight", [-1.0, float("inf"), float("nan")])
def test_a_weight_that_is_none_is_refused(weight):
    with pytest.raises(ValueError, match="finite and not negative"):
        weighted_mean([("a", weight, tensors(1.0)), ("b", 1.0, tensors(1.0))])


def trained(method, peers, listening=(), rounds=1, **options):
    """Return the slow weights of each peer after ``rounds`` rounds; ``listening`` ones join late,
    with other gradients.
    """
    made = method_named(method)
    size = len(peers) if made.group == "everyone" else 2

    def train(exchange):
        weight = torch.nn.Parameter(torch.zeros(4))
        opt = made.make(torch.optim.SGD([weight], lr=0.1), exchange, every=2, **options)
        if exchange.peer in listening:
            opt.listen()
        infos = []
        opt.on_round = infos.append
        for step in range(2 * rounds):
            weight.grad = torch.full((4,), 1.0 + ord(exchange.peer[0]) - ord("a")) * (1 + step)
            opt.count(ord(exchange.peer[0]))
            opt.step()
        opt.finish()
        return opt.slow[0].clone(), weight.detach().clone(), [info.members for info in infos]

    return Simulation(peers, size=size).run(train)


# (Alone, sparseloco does not send, and so loses nothing to its codec.)
@pytest.mark.parametrize("method", [*PAIRS, *GROUPS[:-1]])
@WEIGHTED
def test_the_others_go_on_as_if_it_were_not_there(method, options):
    alone = trained(method, ["a"], **options)["a"][0]
    slow, _, members = trained(method, ["a", "b"], listening=("b",), **options)["a"]
    assert torch.allclose(slow, alone, rtol=0, atol=1e-6)
    assert members == [("a", "b")]


@pytest.mark.parametrize("method", GROUPS)
@WEIGHTED
def test_in_a_group_it_holds_what_the_others_hold(method, options):
    found = trained(method, ["a", "b", "c"], listening=("c",), rounds=3, **options)
    if method != "eager":  # each is ahead of the group by its own pseudo-gradient there
        assert torch.allclose(found["c"][0], found["a"][0], rtol=0, atol=1e-6)
    once = trained(method, ["a", "b", "c"], listening=("c",), **options)
    pair = trained(method, ["a", "b"], **options)
    assert torch.allclose(once["a"][0], pair["a"][0], rtol=0, atol=1e-6)


@WEIGHTED
def test_with_a_partner_it_takes_the_partners_mean(options):
    found = trained("local", ["a", "b"], listening=("b",), **options)
    assert torch.equal(found["b"][0], found["a"][0])


@pytest.mark.parametrize("method", [*PAIRS, *GROUPS])
@WEIGHTED
def test_two_newcomers_average_like_any_two(method, options):
    found = trained(method, ["a", "b"], listening=("a", "b"), **options)
    usual = trained(
        method, ["a", "b"], **({"weight": lambda tokens, steps: 1.0} if options else {})
    )
    for peer in "ab":
        assert torch.allclose(found[peer][0], usual[peer][0], rtol=0, atol=1e-6)


FOUR = ["p0", "p1", "p2", "p3"]
ANCHORED = ["diloco", "diloco-hb", "streaming", "decoupled", "co2", "sparseloco"]
REST = 40


def meet(exchange, method, steps=120, rest=False, seed=0, rounds=None):
    """Train on the peer's own data, with ``rest`` not in the last steps.

    Return what all peers should hold alike.
    """
    generator = torch.Generator().manual_seed(int(exchange.peer[1:]))
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))
    layers = (
        {"fragments": [list(layer.parameters()) for layer in model]}
        if method in ("streaming", "decoupled")
        else {}
    )
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    note = (
        (lambda info: None)
        if rounds is None
        else lambda info: rounds.append((exchange.peer, info.key.round, info.members))
    )
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
    return max(
        float((one - other).abs().max())
        for held in found.values()
        for one, other in zip(held, first, strict=True)
    )


@pytest.mark.parametrize("method", ANCHORED)
def test_failed_round_is_repaired_for_all(method):
    """After a round that failed for all everybody holds the same again."""
    faults = Faults(drop=lambda peer, key: peer == "p1" and key.round == 3)
    found = Simulation(FOUR, size=4, faults=faults).run(lambda exchange: meet(exchange, method))
    assert spread(found) == 0.0


class Doubts:
    """Screen that refuses p1 in round 3."""

    gathers = False

    def problem(self, key, own, peer, theirs):
        return "it is p1" if peer == "p1" and key.round == 3 else None

    def mean(self, me, fragment, contributions, unweighted_count=0):
        return weighted_mean(contributions, unweighted_count)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("method", ANCHORED)
def test_left_behind_peer_takes_over(method):
    """A peer that the others went on without takes over what they hold."""
    rounds = []
    simulation = Simulation(FOUR, size=4, screens={peer: Doubts() for peer in FOUR})
    found = simulation.run(lambda exchange: meet(exchange, method, rounds=rounds))
    assert ("p0", 3, ("p0", "p2", "p3")) in rounds
    assert ("p1", 3, ()) in rounds
    assert spread(found) == 0.0


def test_failed_round_is_made_up_for():
    """DiLoCo is linear, so the mean of four lone outer steps is the outer step with the mean:
    nothing is lost.
    """

    def run(faults):
        return Simulation(FOUR, size=4, faults=faults).run(
            lambda exchange: meet(exchange, "diloco", rest=True)
        )

    failed, whole = run(Faults(drop=lambda peer, key: key.round == 3)), run(None)
    assert spread(failed) == 0.0
    for one, other in zip(failed["p0"], whole["p0"], strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-6)


def test_weights_that_began_differently_are_equal_after_the_first_round():
    found = Simulation(FOUR, size=4).run(
        lambda exchange: meet(exchange, "diloco", steps=20, seed=int(exchange.peer[1:]))
    )
    assert spread(found) == 0.0


@pytest.mark.parametrize("size", [2, 3])
def test_partial_groups_are_left_alone(size):
    """Groups that are not everybody differ by design and are left alone."""
    simulation = Simulation(FOUR, size=size)
    found = simulation.run(lambda exchange: meet(exchange, "diloco", steps=30))
    assert spread(found) > 0
    assert not any(round.only for round in simulation.rounds.values())


def test_largest_part_wins_and_ties_average():
    """The largest part is right and among equals the mean of them."""
    a, near, b, c = (1.0, 2.0), (1.0, 2.0 + 1e-7), (1.0, 2.1), (3.0, 2.0)
    assert sources({"p0": a, "p1": near}) == []
    assert sources({"p0": b, "p1": a, "p2": near}) == ["p1"]
    assert sources({"p0": a, "p1": b, "p2": c}) == ["p0", "p1", "p2"]
    assert sources({"p0": a, "p1": b, "p2": c}, first=True) == ["p0"]
    assert sources({"p0": a, "p1": b, "p2": near, "p3": b}) == ["p0", "p1"]
    assert sources({"p0": c, "p1": a, "p2": near}, first=True) == ["p1"]


THREE = ["a", "b", "c"]
MISSED = (2, 3)


class Blind(Exchange):
    """Exchange that does not compare what the peers hold, as a swarm's does not."""

    def __init__(self, exchange):
        self.start = exchange.start


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


LOSING = {
    "diloco": lambda inner, exchange, net: DiLoCo(inner, exchange, every=4),
    "streaming": lambda inner, exchange, net: StreamingDiLoCo(
        inner, exchange, every=8, fragments=2, lag=3, model=net
    ),
    "co2": lambda inner, exchange, net: CO2(inner, exchange, every=4),
}


def missed(make, steps, adopt_at=None):
    """Return {peer: (slow weights after each step, optimizer)}; rounds are missed, and from
    ``adopt_at`` on "c" adopts from "a".
    """
    states = {}

    def peer(exchange):
        net = two_layers()
        opt = make(torch.optim.SGD(net.parameters(), lr=0.05), Blind(exchange), net)
        data = torch.Generator().manual_seed(ord(exchange.peer))
        history, astray = [], set(range(opt.fragments))
        for step in range(1, steps + 1):
            net(torch.randn(5, 3, generator=data)).square().mean().backward()
            opt.step()
            opt.zero_grad()
            if exchange.peer == "a":
                states[step] = (
                    [t.clone() for t in opt.slow],
                    opt.round,
                    {n: [t.clone() for t in ts] for n, ts in opt.shared.items()},
                    list(opt.applied),
                )
            elif exchange.peer == "c" and adopt_at is not None and step >= adopt_at and astray:
                slow, round, shared, applied = states[
                    step - 1
                ]  # as old as what comes over a network
                assert round <= opt.round
                taken = opt.adopt(slow, round=opt.round, shared=shared, applied=applied)
                assert all(applied[p] >= 0 for p in taken)
                astray -= set(taken)
            history.append([t.clone() for t in opt.slow])
            exchange.sleep(1.0)
        return history, opt

    faults = Faults(drop=lambda name, key: name == "c" and key.round in MISSED)
    # In those rounds nobody gets a mean, so each goes its own way.
    return Simulation(THREE, size=3, wait=0.5, faults=faults).run(peer)


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", LOSING)
def test_lost_round_without_weights_stays_apart(name):
    """Without the weights of the others a lost round is apart for good."""
    ends = missed(LOSING[name], 64)
    assert not equal(ends["a"][0][-1], ends["c"][0][-1])


@pytest.mark.thinned(6)
@pytest.mark.parametrize("late", range(20, 28))
@pytest.mark.parametrize("name", LOSING)
def test_taking_over_makes_equal_at_whatever_step_it_comes(name, late):
    ends = missed(LOSING[name], 64, adopt_at=late)
    assert equal(ends["a"][0][-1], ends["c"][0][-1])
    assert equal(ends["a"][0][-9], ends["c"][0][-9])


def test_what_is_older_there_than_here_is_not_taken():
    net = two_layers()
    opt = LOSING["streaming"](torch.optim.SGD(net.parameters(), lr=0.05), Alone(), net)
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
    [
        ({"shared": {"other": []}}, "does not share"),
        ({"applied": [1, 2, 3]}, "in 3 fragments, this optimizer's in 1"),
    ],
)
def test_what_does_not_fit_changes_nothing(given, reason):
    net = two_layers()
    opt = LOSING["diloco"](torch.optim.SGD(net.parameters(), lr=0.05), Alone(), net)
    before = [t.clone() for t in opt.slow]
    with pytest.raises(ValueError, match=reason):
        opt.adopt([torch.full_like(t, 9.0) for t in opt.slow], round=3, **given)
    assert equal(before, opt.slow)
    assert opt.round == 0


def test_what_is_dropped_is_given_up_in_the_exchange_too():
    """Else its partner would count a contribution that is sent again here.

    Of a fragment that stays, nothing is.
    """
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
    net = two_layers()
    opt = NoLoCo(
        torch.optim.SGD(net.parameters(), lr=0.05), exchange, every=4, fragments=2, lag=3, model=net
    )
    while opt.round < 2:
        opt.step()
    slow = [t.clone() for t in opt.slow]
    opt.adopt(slow, round=2, applied=[0, -1])
    assert given_up == [0]
    opt.adopt(slow, round=2, into_model=True)
    assert given_up == [0, 1]
