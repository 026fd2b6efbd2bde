"""Exchanges that are refused or late: a codec's residual adds up to all that was learnt, and lags
that a peer finds by itself.
"""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.optim import (
    CO2Rule,
    Delayed,
    DiLoCoRule,
    EagerRule,
    ErrorFeedback,
    Every,
    LocalSGD,
    Mean,
    OuterOptimizer,
    Simulation,
    SparseLoCo,
    Streaming,
    codec_named,
)
from shoal.optim.exchange.base import Exchange, Handle, NoPartner
from shoal.optim.exchange.simulation import Faults
from shoal.optim.outer.optimizer import ROUNDS_PER_EXCHANGE

CODECS = ["topk2+ef", "e3m0+ef", "sign+ef", "int8+ef", "auto:2+ef"]
EVERY, SHAPES = 2, [(3, 5), (40,)]
CASES = {
    "at once": (DiLoCoRule(1.0, 0.0), Every(EVERY)),
    "a fragment at a time": (DiLoCoRule(1.0, 0.0), Streaming(EVERY, 2)),
    "a round late": (CO2Rule(1.0, 0.0, 1.0, None), Delayed(EVERY)),
    "eager": (EagerRule(1.0, 0.0), Delayed(EVERY)),
}


class LateHandle(Handle):
    """Handle of an exchange that encodes while training goes on: here not before it is asked or, if
    it is given up, before the next one begins.
    """

    def __init__(self, mine, outcome, given_up):
        self.mine, self.outcome, self.mean, self.given_up = mine, outcome, None, given_up

    def done(self):
        return True

    def encode(self):
        if self.outcome == "refused":
            raise ValueError("refused")
        if self.mine is not None:
            shapes = [tuple(tensor.shape) for tensor in self.mine.tensors]
            sent = self.mine.codec.decode(self.mine.codec.encode(self.mine.tensors), shapes)
            self.mean = Mean(sent, 1.0, ("me",)) if self.outcome == "late yes" else None
            self.mine = None

    def result(self, deadline=None):
        self.encode()
        return self.mean

    def close(self):
        self.given_up.append(self)


class ScriptedExchange(Exchange):
    """Exchange of one peer with given outcomes: "yes", "no" (encoded and sent in vain), the same
    "late", or "nobody" (not even encoded).
    """

    def __init__(self, outcomes):
        self.outcomes, self.given_up = iter(outcomes), []

    def start(self, mine):
        while self.given_up:
            self.given_up.pop().encode()
        outcome = next(self.outcomes, "nobody")
        if outcome == "nobody":
            return NoPartner()
        if outcome not in ("yes", "no"):
            return LateHandle(mine, outcome, self.given_up)
        shapes = [tuple(tensor.shape) for tensor in mine.tensors]
        sent = mine.codec.decode(mine.codec.encode(mine.tensors), shapes)
        mean = Mean(sent, 1.0, ("me",)) if outcome == "yes" else None
        return type(
            "Ready",
            (Handle,),
            {"done": lambda self: True, "result": lambda self, deadline=None: mean},
        )()


class Drifting:
    """Weights that every inner step moves by a random vector."""

    def __init__(self, rule, schedule, codec, outcomes, seed):
        self.weights = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        self.opt = OuterOptimizer(
            torch.optim.SGD(self.weights, lr=1.0),
            ScriptedExchange(outcomes),
            rule=rule,
            schedule=schedule,
            codec=codec,
            fragments=[[weight] for weight in self.weights]
            if isinstance(schedule, Streaming)
            else None,
        )
        self.generator = torch.Generator().manual_seed(seed)
        self.learnt = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]

    def train(self, steps):
        for _ in range(steps):
            for weight, learnt in zip(self.weights, self.learnt, strict=True):
                weight.grad = torch.randn(weight.shape, generator=self.generator)
                learnt += weight.grad.double()
            self.opt.step()

    def finish(self):
        self.opt.finish()
        residual = []
        for fragment in range(self.opt.fragments):
            part = self.opt.positions(fragment)
            residual += self.opt._fragments[fragment].codec.error or [
                torch.zeros(SHAPES[i]) for i in part
            ]
        for weight, error, learnt in zip(self.weights, residual, self.learnt, strict=True):
            torch.testing.assert_close(error.double() - weight.double(), learnt, rtol=0, atol=1e-4)


rounds = st.lists(
    st.sampled_from(["yes", "no", "late yes", "late no", "nobody"]), min_size=1, max_size=8
)


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=25)
@given(st.sampled_from(CODECS), rounds, st.integers(0, 999))
def test_applied_and_residual_add_up(case, codec, outcomes, seed):
    """Applied values and residual add up to all that was learnt."""
    world = Drifting(*CASES[case], codec_named(codec), outcomes, seed)
    world.train(EVERY * len(outcomes))
    world.finish()


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=15)
@given(st.sampled_from(CODECS), rounds, rounds, st.integers(0, 999))
def test_a_state_saved_during_an_exchange_has_the_same_residual(case, codec, before, after, seed):
    world = Drifting(*CASES[case], codec_named(codec), before, seed)
    world.train(EVERY * len(before))
    again = Drifting(*CASES[case], codec_named(codec), after, seed)
    again.generator.set_state(world.generator.get_state())
    again.learnt = copy.deepcopy(world.learnt)
    for mine, theirs in zip(again.weights, world.weights, strict=True):
        mine.data.copy_(theirs.data)
    again.opt.load_state_dict(copy.deepcopy(world.opt.state_dict()))
    world.finish()  # saving changed nothing
    again.train(EVERY * len(after))
    again.finish()


@pytest.mark.parametrize("case", CASES)
def test_a_refused_contribution_leaves_nothing_in_flight(case):
    """The fault: once told, training could load no other state, and never send again."""
    world = Drifting(*CASES[case], codec_named("sign+ef"), ["refused", *["late yes"] * 20], 0)
    state = copy.deepcopy(world.opt.state_dict())
    with pytest.raises(ValueError, match=r"^refused$"):
        world.train(2 * EVERY)
    assert not world.opt._in_flight
    world.opt.load_state_dict(state)
    world.train(3 * EVERY)
    world.opt.finish()


@pytest.mark.parametrize("case", ["a round late", "eager"])
def test_what_is_dropped_while_it_is_encoded_is_taken_back(case):
    def dropped(outcome):
        world = Drifting(*CASES[case], codec_named("sign+ef"), [outcome] * 20, 0)
        for _ in range(5):
            world.train(3)
            while not world.opt.in_flight(0):
                world.train(1)
            slow = [tensor.clone() for tensor in world.opt.slow]
            world.opt.adopt(slow, round=world.opt.round)
        world.train(4)
        world.opt.finish()
        return [*world.weights, *world.opt.codec.error]

    for late, early in zip(dropped("late yes"), dropped("yes"), strict=True):
        torch.testing.assert_close(late, early)


@settings(max_examples=20)
@given(st.sets(st.integers(0, 5)), st.sets(st.integers(0, 5)), st.integers(0, 99))
def test_drops_lose_and_repeat_nothing(lost_by_a, lost_by_b, seed):
    """SparseLoCo with beta 1: over both peers, slow weights plus residuals are all that both have
    learnt (halved if averaged).
    """
    lost = {"a": lost_by_a, "b": lost_by_b}

    def peer(exchange):
        generator = torch.Generator().manual_seed(seed + ord(exchange.peer))
        weight = torch.nn.Parameter(torch.zeros(70))
        opt = SparseLoCo(
            torch.optim.SGD([weight], lr=1.0), exchange, codec=codec_named("topk2+ef"), every=1
        )
        learnt, applied = torch.zeros(70, dtype=torch.float64), torch.zeros(70, dtype=torch.float64)
        for _ in range(6):
            slow = opt.slow[0].clone()
            weight.grad = torch.randn(70, generator=generator)
            opt.step()
            learnt += weight.grad.double()
            applied += (slow - opt.slow[0]).double()
        return learnt, applied, opt.codec.error[0].double()

    faults = Faults(drop=lambda name, key: key.round in lost[name])
    found = Simulation(["a", "b"], faults=faults).run(peer)
    learnt, applied, residual = (sum(values) for values in zip(*found.values(), strict=True))
    torch.testing.assert_close(applied + residual, learnt, rtol=0, atol=1e-4)


def test_with_a_fading_memory_a_refused_round_only_fades_it():
    codec = codec_named("topk2+ef:0.9")
    first, second = torch.randn(2, 300, generator=torch.Generator().manual_seed(1))
    codec.encode([first])
    assert codec.pending
    codec.accepted()
    residual = codec.error[0].clone()
    codec.encode([second])
    codec.rejected([second])
    assert not codec.pending
    torch.testing.assert_close(codec.error[0], 0.9 * residual, rtol=0, atol=1e-6)


def test_cancelling_an_exchange_in_flight_gives_back_its_contribution():
    world = Drifting(DiLoCoRule(), Streaming(EVERY, 2, 1), codec_named("e3m0+ef"), ["yes"] * 9, 3)
    world.train(2)
    codec = world.opt._fragments[1].codec
    assert isinstance(codec, ErrorFeedback)
    assert codec.pending
    world.opt.adopt([tensor.clone() for tensor in world.opt.slow], round=5)
    assert not codec.pending
    assert codec.error[0].abs().max() < 1e-6


ROUND, FRAGMENTS, STEPS, RATE, OTHER = 6, 3, 40, 0.5, 3.0


class Drawn(Exchange):
    """Exchange with a peer whose weights are all ``OTHER``; by round, how many polls it takes,
    whether it comes to nothing, and whether it moves bytes until then.
    """

    def __init__(self, plan):
        self.plan, self.under_way, self.most = plan, {}, 0

    def start(self, contribution):
        key = contribution.key
        polls, fails, moves = self.plan[key.round % len(self.plan)]
        handle = DrawnHandle(
            self,
            key,
            [(tensor + OTHER) / 2 for tensor in contribution.tensors],
            polls,
            fails,
            moves,
        )
        self.under_way.setdefault(key.fragment, set()).add(handle)
        self.most = max(self.most, len(self.under_way[key.fragment]))
        return handle


class DrawnHandle(Handle):
    def __init__(self, exchange, key, tensors, left, fails, moving):
        self.exchange, self.key, self.tensors, self.left, self.fails, self.moving = (
            exchange,
            key,
            tensors,
            left,
            fails,
            moving,
        )

    def done(self):
        self.left -= 1
        return self.left <= 0

    def leave_out(self):
        return self.moving

    def result(self, deadline=None):
        self.exchange.under_way[self.key.fragment].discard(self)
        return None if self.fails else Mean(self.tensors, 2.0, ("a", "b"))


def made(exchange, infos):
    weights = [torch.nn.Parameter(torch.tensor([1.0 + place])) for place in range(FRAGMENTS)]
    inner = torch.optim.SGD(weights, lr=RATE)
    opt = LocalSGD(
        inner,
        exchange,
        every=ROUND,
        fragments=[[p] for p in weights],
        lag="auto",
        on_round=infos.append,
    )
    return weights, opt


def train(weights, opt, start, stop, seen):
    for step in range(start, stop):
        for place, weight in enumerate(weights):
            weight.grad = torch.tensor([gradient(step, place)])
        opt.step()
        seen.append([weight.item() for weight in weights])


def gradient(step, place):
    return ((7 * step + 3 * place) % 5 - 2) / 10


def reference(plan):
    """The weights after each step, from the formulas: sent is the fast weight, and fast moves by
    mean - sent when it is applied.
    """
    fast = [1.0 + place for place in range(FRAGMENTS)]
    flying, arrivals, seen, round, applied = {}, [], [], 0, []
    for step in range(1, STEPS + 1):
        fast = [value - RATE * gradient(step - 1, place) for place, value in enumerate(fast)]

        def apply(place, step=step, fast=fast):
            number, at, sent, _, arrived, lag = flying.pop(place)
            fails = plan[number % len(plan)][1]
            if not fails:
                fast[place] += (sent + OTHER) / 2 - sent
                arrivals.append(min(arrived, ROUND))
            applied.append((number, step - at, arrived > lag))

        for place, (number, at, sent, left, arrived, lag) in list(flying.items()):
            if arrived is None:
                flying[place] = (
                    number,
                    at,
                    sent,
                    left - 1,
                    max(step - at, 1) if left <= 1 else None,
                    lag,
                )
        for place in range(FRAGMENTS):
            if (step - (place + 1) * ROUND // FRAGMENTS) % ROUND == 0:
                if place in flying:
                    number, at, sent, left, arrived, lag = flying[place]
                    if (
                        arrived is None
                        and plan[number % len(plan)][2]
                        and step - at < ROUNDS_PER_EXCHANGE * ROUND
                    ):
                        round += 1
                        continue
                    flying[place] = (
                        number,
                        at,
                        sent,
                        left,
                        step - at if arrived is None else arrived,
                        lag,
                    )
                    apply(place)
                lag = 1
                if arrivals:
                    latest = sorted(arrivals[-24:])[-1 - (len(arrivals[-24:]) + 8) // 12]
                    lag = min(latest + latest // 8, ROUND)
                flying[place] = (round, step, fast[place], plan[round % len(plan)][0], None, lag)
                round += 1
        for place in sorted(flying):
            number, at, sent, left, arrived, lag = flying[place]
            if arrived is not None and step - at >= min(arrivals[-24:], default=1):
                apply(place)
        seen.append(list(fast))
    return seen, applied


PLANS = st.lists(
    st.tuples(st.integers(1, 4 * ROUND), st.booleans(), st.booleans()), min_size=1, max_size=9
)


@settings(max_examples=40)
@given(plan=PLANS, at=st.integers(0, STEPS))
def test_arrivals_are_applied_once_after_interruption(plan, at):
    """Arrivals have the values of the formulas, also after an interruption."""
    exchange, infos, seen = Drawn(plan), [], []
    weights, opt = made(exchange, infos)
    train(weights, opt, 0, STEPS, seen)
    wanted, applied = reference(plan)
    assert exchange.most == 1
    assert [(info.key.round, info.lag, info.late) for info in infos] == applied
    assert all(
        info.lag <= ROUND * (ROUNDS_PER_EXCHANGE if plan[info.key.round % len(plan)][2] else 1)
        for info in infos
    )
    torch.testing.assert_close(torch.tensor(seen), torch.tensor(wanted), rtol=0, atol=1e-5)

    again, before = Drawn(plan), []
    weights, opt = made(again, [])
    train(weights, opt, 0, at, before)
    left = {p.context.key.round: p.handle.left for p in opt._in_flight}
    state, values = copy.deepcopy(opt.state_dict()), [weight.detach().clone() for weight in weights]
    resumed = Drawn(plan)
    start = resumed.start

    def going_on(contribution):
        handle = start(contribution)
        handle.left = left.pop(contribution.key.round, handle.left)  # what it still needs
        return handle

    resumed.start = going_on
    weights, opt = made(resumed, [])
    with torch.no_grad():
        for weight, value in zip(weights, values, strict=True):
            weight.copy_(value)
    opt.load_state_dict(state)
    train(weights, opt, at, STEPS, before)
    assert before == seen
