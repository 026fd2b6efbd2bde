"""Lags that a peer finds by itself, under drawn arrivals, failures and interruptions: what holds in every case, and the values."""

import copy

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.optim import LocalSGD
from shoal.optim.exchange.base import Exchange, Handle, Mean
from shoal.optim.outer.optimizer import LASTS

EVERY, FRAGMENTS, STEPS, RATE, OTHER = 6, 3, 40, 0.5, 3.0


class Drawn(Exchange):
    """Exchange with a peer whose weights are all ``OTHER``; by round, how many polls it takes, whether it comes to nothing, and
    whether it moves bytes until then.
    """

    def __init__(self, plan):
        self.plan, self.under_way, self.most = plan, {}, 0

    def start(self, contribution):
        key = contribution.key
        polls, fails, moves = self.plan[key.round % len(self.plan)]
        handle = DrawnHandle(self, key, [(tensor + OTHER) / 2 for tensor in contribution.tensors], polls, fails, moves)
        self.under_way.setdefault(key.fragment, set()).add(handle)
        self.most = max(self.most, len(self.under_way[key.fragment]))
        return handle


class DrawnHandle(Handle):
    def __init__(self, exchange, key, tensors, left, fails, moving):
        self.exchange, self.key, self.tensors, self.left, self.fails, self.moving = exchange, key, tensors, left, fails, moving

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
    opt = LocalSGD(inner, exchange, every=EVERY, fragments=[[p] for p in weights], lag="auto", on_round=infos.append)
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
    """The weights after each step, from the formulas: sent is the fast weight, and fast moves by mean - sent when it is applied."""
    fast = [1.0 + place for place in range(FRAGMENTS)]
    flying, arrivals, seen, round, applied = {}, [], [], 0, []
    for step in range(1, STEPS + 1):
        fast = [value - RATE * gradient(step - 1, place) for place, value in enumerate(fast)]

        def apply(place, step=step, fast=fast):
            number, at, sent, _, arrived, lag = flying.pop(place)
            fails = plan[number % len(plan)][1]
            if not fails:
                fast[place] += (sent + OTHER) / 2 - sent
                arrivals.append(min(arrived, EVERY))
            applied.append((number, step - at, arrived > lag))

        for place, (number, at, sent, left, arrived, lag) in list(flying.items()):
            if arrived is None:
                flying[place] = (number, at, sent, left - 1, max(step - at, 1) if left <= 1 else None, lag)
        for place in range(FRAGMENTS):
            if (step - (place + 1) * EVERY // FRAGMENTS) % EVERY == 0:
                if place in flying:
                    number, at, sent, left, arrived, lag = flying[place]
                    if arrived is None and plan[number % len(plan)][2] and step - at < LASTS * EVERY:
                        round += 1
                        continue
                    flying[place] = (number, at, sent, left, step - at if arrived is None else arrived, lag)
                    apply(place)
                lag = 1
                if arrivals:
                    latest = sorted(arrivals[-24:])[-1 - (len(arrivals[-24:]) + 8) // 12]
                    lag = min(latest + latest // 8, EVERY)
                flying[place] = (round, step, fast[place], plan[round % len(plan)][0], None, lag)
                round += 1
        for place in sorted(flying):
            number, at, sent, left, arrived, lag = flying[place]
            if arrived is not None and step - at >= min(arrivals[-24:], default=1):
                apply(place)
        seen.append(list(fast))
    return seen, applied


PLANS = st.lists(st.tuples(st.integers(1, 4 * EVERY), st.booleans(), st.booleans()), min_size=1, max_size=9)


@settings(max_examples=40, deadline=None)
@given(plan=PLANS, at=st.integers(0, STEPS))
def test_whatever_arrives_is_applied_once_with_the_values_of_the_formulas_also_after_an_interruption(plan, at):
    exchange, infos, seen = Drawn(plan), [], []
    weights, opt = made(exchange, infos)
    train(weights, opt, 0, STEPS, seen)
    wanted, applied = reference(plan)
    assert exchange.most == 1
    assert [(info.key.round, info.lag, info.late) for info in infos] == applied
    assert all(info.lag <= EVERY * (LASTS if plan[info.key.round % len(plan)][2] else 1) for info in infos)
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
