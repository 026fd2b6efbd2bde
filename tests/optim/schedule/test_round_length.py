"""When a schedule's actions happen: in rounds of tokens and seconds, and with a lag that follows
the arrivals.
"""

import copy
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.optim import (
    CO2,
    Alone,
    Delayed,
    EagerRule,
    Every,
    Faults,
    NoLoCo,
    OuterOptimizer,
    Seconds,
    Simulation,
    Steps,
    Streaming,
    StreamingDiLoCo,
    Tokens,
    by_tokens,
)
from shoal.optim.exchange.base import Exchange, Handle, Mean
from shoal.optim.rules.diloco import DiLoCoRule
from shoal.optim.schedule.agreed_seconds import GRID, LONGEST_S, SHORTEST_S, STEPS, agreed_seconds
from shoal.optim.schedule.auto_lag import WINDOW, AutoLag
from shoal.optim.schedule.schedules import SentAhead
from tests.support.outer_training import Recording


class Clock:
    """Clock that is set by hand."""

    def __init__(self, now=0.0):
        self.now = now

    def __call__(self):
        return self.now


@st.composite
def schedules(draw):
    every = draw(st.integers(1, 12))
    fragments = draw(st.integers(1, every))
    kind = draw(st.sampled_from([Every, Streaming, Delayed]))
    if kind is Every:
        return Every(every)
    return (
        Delayed(every, fragments)
        if kind is Delayed
        else Streaming(every, fragments, draw(st.integers(0, every - 1)))
    )


def visit(length, schedule, amounts):
    """Return the positions of each step; ``amounts`` yields the tokens counted by then."""
    position, found = 0, []
    for tokens in amounts:
        reached = list(length.reached(position, schedule, tokens))
        position = reached[-1] if reached else position
        found.append(reached)
    return found


def check_each_once_and_never_beyond_a_round(found, every):
    flat = [position for step in found for position in step]
    assert flat == list(range(1, len(flat) + 1))
    for step in found:
        assert len({(position - 1) // every for position in step}) <= 1


@given(schedules(), st.integers(1, 300), st.lists(st.integers(1, 700), min_size=1, max_size=60))
def test_token_rounds_visit_every_position(schedule, size, batches):
    """Tokens visit every position once and end a round when they are there."""
    totals = torch.tensor(batches).cumsum(0).tolist()
    found = visit(Tokens(size), schedule, totals)
    check_each_once_and_never_beyond_a_round(found, schedule.every)
    ends = sum(bool(step) and step[-1] % schedule.every == 0 for step in found)
    # A batch of several rounds is one; else there is one end for each full round.
    assert ends <= totals[-1] // size
    if max(batches) <= size:
        assert ends == totals[-1] // size


@given(
    schedules(),
    st.floats(0.25, 50),
    st.floats(0, 2e9),
    st.lists(st.floats(0.01, 80), min_size=1, max_size=60),
    st.floats(0, 30),
)
def test_second_rounds_visit_every_position(schedule, size, now, steps, exchange):
    """Seconds visit every position once and end a round at the first step after its time."""
    clock = Clock(now)
    length = Seconds(size, clock)
    position, found, began = 0, [], None
    for seconds in steps:
        clock.now += seconds
        before, reached = clock.now, []
        for here in length.reached(position, schedule, 0):
            position = here
            reached.append(here)
        found.append(reached)
        if began is None:
            began = before
        elif reached and reached[-1] % schedule.every == 0:
            assert before - began >= size / 2 * (1 - 1e-6)
            assert before - seconds - began <= size * 1.5 * (
                1 + 1e-6
            )  # it had not been over one step earlier
            began = before
        else:
            assert before - began <= size * 1.5 * (1 + 1e-6)
    check_each_once_and_never_beyond_a_round(found, schedule.every)


def test_long_exchange_shortens_the_next_round():
    """An exchange that takes long shortens the next round and does not move the others."""
    clock, schedule = Clock(0.0), Every(1)
    length, ends = Seconds(10.0, clock), []
    for _ in range(300):
        clock.now += 0.5
        for _position in length.reached(len(ends), schedule, 0):
            ends.append(clock.now)
            clock.now += 4.0 if len(ends) == 2 else 7.0 if len(ends) == 4 else 0.0
    assert ends[:6] == [
        10.0,
        20.0,
        30.0,
        40.0,
        60.0,
        70.0,
    ]  # after 7 of 10 seconds the rest is not worth a round


@pytest.mark.parametrize("jump", [-1e6, 1e6])
def test_clock_jump_costs_one_round(jump):
    """A clock that is set costs one round of wrong length."""
    clock, schedule = Clock(1000.0), Every(4)
    length, position, ends = Seconds(10.0, clock), 0, []
    for step in range(400):
        clock.now += 0.5 + (jump if step == 170 else 0.0)
        for here in length.reached(position, schedule, 0):
            position = here
            if here % 4 == 0:
                ends.append(step)
    gaps = [later - earlier for earlier, later in itertools.pairwise(ends)]
    assert sorted(gaps)[1:-1] == [20] * (len(gaps) - 2)
    assert min(gaps) >= 1
    assert max(gaps) <= 50


def test_lengths_that_are_none():
    for value in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="positive and finite number of seconds"):
            Seconds(value, Clock())
        with pytest.raises(ValueError, match="positive and finite number of seconds"):
            list(Seconds(lambda value=value: value, Clock()).reached(0, Every(1), 0))
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        Tokens(0)
    with pytest.raises(ValueError, match="no tokens were counted"):
        list(Tokens(5).reached(0, Every(1), 0))


# -- in the optimizer ------------------------------------------------------------------------------


def make(schedule, length, parts=1):
    torch.manual_seed(3)
    weights = [torch.nn.Parameter(torch.randn(3)) for _ in range(parts)]
    inner = torch.optim.SGD(weights, lr=0.1, momentum=0.5)
    fragments = [[weight] for weight in weights] if parts > 1 else None
    rule = EagerRule(0.4, 0.6) if isinstance(schedule, Delayed) else DiLoCoRule(0.7, 0.9, mix=0.25)
    opt = OuterOptimizer(
        inner, Alone(), rule=rule, schedule=schedule, length=length, fragments=fragments
    )
    return weights, opt


def advance(weights, opt, batches):
    for batch in batches:
        opt.zero_grad()
        (sum(weight.square().sum() for weight in weights) * batch / 50).backward()
        opt.count(batch)
        opt.step()


def bits(weights, opt):
    return [
        t.clone()
        for t in (
            *[w.detach() for w in weights],
            *opt.slow,
            *(t for ts in opt.rule_state.values() for t in ts),
        )
    ]


@pytest.mark.parametrize(
    "schedule",
    [Every(6), Streaming(6, 3, 0), Streaming(6, 3, 4), SentAhead(6, 2, 2), Delayed(6, 3)],
)
def test_one_batch_of_tokens_equals_steps(schedule):
    """Tokens of one batch a position are the same bits as steps."""
    parts = getattr(schedule, "fragments", 1)
    rule = {"steps": Steps(), "tokens": Tokens(6 * 8)}
    ends = {}
    for name, length in rule.items():
        weights, opt = make(schedule, length, parts)
        advance(weights, opt, [8] * 40)
        ends[name] = bits(weights, opt)
        assert (opt.position, opt.steps) == (40, 40)
    assert all(torch.equal(a, b) for a, b in zip(ends["steps"], ends["tokens"], strict=True))


@settings(max_examples=30)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=30), st.data())
def test_resumed_token_run_is_bit_equal(batches, data):
    """A run of tokens resumed at any step ends with the same bits."""
    at = data.draw(st.integers(0, len(batches)))
    schedule = data.draw(st.sampled_from([Every(5), Streaming(5, 3, 0), SentAhead(6, 2, 2)]))
    parts = getattr(schedule, "fragments", 1)
    weights, opt = make(schedule, Tokens(60), parts)
    advance(weights, opt, batches[:at])
    saved = copy.deepcopy(opt.state_dict()), [weight.detach().clone() for weight in weights]
    advance(weights, opt, batches[at:])

    again, other = make(schedule, Tokens(60), parts)
    other.load_state_dict(saved[0])
    for weight, value in zip(again, saved[1], strict=True):
        weight.data.copy_(value)
    advance(again, other, batches[at:])
    assert all(
        torch.equal(a, b) for a, b in zip(bits(weights, opt), bits(again, other), strict=True)
    )
    assert (other.position, other.round, other.tokens) == (opt.position, opt.round, opt.tokens)


def test_seconds_resumed_in_mid_round_neither_skip_nor_repeat_anything():
    exchange = Recording()

    def peer(clock):
        weights, opt = make(Streaming(6, 3, 1), Seconds(6.0, clock), 3)
        opt.exchange = exchange
        return weights, opt

    clock = Clock(100.0)
    weights, opt = peer(clock)
    for _ in range(13):
        clock.now += 0.75
        advance(weights, opt, [1])
    state, at = copy.deepcopy(opt.state_dict()), opt.position
    assert at % 6 != 0
    later = Clock(1000.3)
    weights, opt = peer(later)
    opt.load_state_dict(state)
    assert opt.position == at
    for _ in range(40):
        later.now += 0.75
        advance(weights, opt, [1])
    sent = [(one.key.round, one.key.fragment) for one in exchange.sent]
    assert sent == [(round, round % 3) for round in range(len(sent))]
    assert len(sent) > 15


def test_a_checkpoint_of_another_length_is_taken_over():
    weights, opt = make(Every(5), Steps())
    advance(weights, opt, [3] * 7)
    _, other = make(Every(5), Tokens(100))
    other.load_state_dict(opt.state_dict())
    assert other.position == 7
    assert list(other.length.reached(7, other.schedule, other.tokens + 99)) == [8, 9]
    assert list(other.length.reached(9, other.schedule, other.tokens + 100)) == [10]


def test_one_step_may_reach_several_positions():
    """A peer so slow that each step is a whole round: a contribution sent early in it is also
    applied in it.
    """
    clock, applied = Clock(0.0), []
    weights, opt = make(Streaming(3, 3, 2), Seconds(1.0, clock), 3)
    opt.on_round = applied.append
    for _ in range(6):
        clock.now += 5.0
        advance(weights, opt, [1])
    assert opt.position == 15  # the first step only starts the clock
    assert [info.key.round for info in applied] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert {(info.key.fragment, info.lag) for info in applied} == {(0, 0), (1, 1), (2, 1)}


def test_a_delayed_method_keeps_one_round_of_delay():
    weight = torch.nn.Parameter(torch.ones(2))
    infos, clock = [], Clock(0.0)
    opt = CO2(
        torch.optim.SGD([weight], lr=0.1),
        Alone(),
        every=4,
        length=Seconds(4.0, clock),
        on_round=infos.append,
    )
    for _ in range(30):
        clock.now += 1.0
        weight.grad = weight.detach().clone()
        opt.step()
    assert [info.key.round for info in infos] == list(range(len(infos)))
    assert {info.lag for info in infos} == {4}


def test_an_optimizer_that_counts_weighs_only_if_asked_to():
    exchange = Recording()
    for options in ({}, {"weight": by_tokens}):
        parameter = torch.nn.Parameter(torch.ones(1))
        opt = NoLoCo(torch.optim.SGD([parameter], lr=0.1), exchange, every=2, **options, lag=0)
        for _ in range(2):
            opt.count(7)
            opt.step()
    assert [(sent.weight, len(sent.tensors)) for sent in exchange.sent] == [(1.0, 1), (14.0, 2)]


# -- seconds that all peers agree on ---------------------------------------------------------------

speeds = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20)


@given(speeds, st.randoms())
def test_agreed_seconds_let_the_slowest_useful_peer_make_its_steps(values, random):
    found = agreed_seconds(values)
    assert SHORTEST_S <= found <= LONGEST_S
    shuffled = [*values, 0.0, -1.0, math.nan, math.inf]
    random.shuffle(shuffled)
    assert agreed_seconds(shuffled) == found
    median = sorted(values)[(len(values) - 1) // 2]
    useful = min(value for value in values if value >= median / 8)
    assert found == LONGEST_S or found * useful >= STEPS * (1 - 1e-8)
    # And no longer than it takes.
    assert found == SHORTEST_S or found * useful <= STEPS * 2 ** (1 / GRID) * (1 + 1e-8)


@given(
    st.lists(st.floats(1e-2, 1e2), min_size=2, max_size=12),
    st.one_of(st.floats(), st.just(1e-300), st.just(1e300)),
)
def test_one_liar_cannot_move_it_beyond_what_honest_speeds_allow(honest, lie):
    found = agreed_seconds([*honest, lie])
    assert found >= agreed_seconds([max(honest)])
    assert found <= agreed_seconds([min(honest) / 8])


@given(st.lists(st.floats(0.05, 5), min_size=2, max_size=12), st.data())
def test_near_views_give_near_lengths(values, data):
    """Views that differ a little give lengths at most one notch apart."""
    noisy = [value * data.draw(st.floats(0.97, 1.03)) for value in values]
    median = sorted(values)[(len(values) - 1) // 2]
    if any(abs(value / (median / 8) - 1) < 0.07 for value in values):
        return  # on the edge of being useful
    ratio = agreed_seconds(noisy) / agreed_seconds(values)
    assert 2 ** (-1 / GRID) * 0.999 <= ratio <= 2 ** (1 / GRID) * 1.001


def test_agreed_seconds_by_example():
    assert agreed_seconds([]) == agreed_seconds([0.0, 0.0]) == SHORTEST_S
    assert agreed_seconds([10.0, 10.0]) == 1.0
    assert agreed_seconds([1.0, 10.0]) == pytest.approx(2 ** (14 / 4))  # 10 s, rounded up
    assert agreed_seconds([1.0, 10.0, 10.0]) == pytest.approx(
        1.0
    )  # 10 times slower than the rest: not waited for
    assert agreed_seconds([2.0, 10.0, 10.0]) == pytest.approx(2 ** (10 / 4))
    assert agreed_seconds([1e-9]) == LONGEST_S
    assert agreed_seconds([1e-320, 1e-320]) == LONGEST_S


def found(arrivals, every=100):
    lag = AutoLag(every)
    for positions in arrivals:
        lag.observe(positions)
    return lag.lag


@pytest.mark.parametrize(
    ("arrivals", "lag"),
    [
        ([3], 3),
        ([8], 9),
        ([20, 8, 9], 22),
        ([20, 8, 9, 9], 10),
        ([8] * 22 + [60, 70], 9),
        ([8] * 21 + [60, 70, 80], 67),
        ([1] * 9, 1),
    ],
)
def test_lag_covers_nearly_all_arrivals(arrivals, lag):
    """It is the least with which nearly all are in time and an eighth."""
    assert found(arrivals) == lag


def test_what_is_long_ago_is_forgotten():
    assert found([90] * 30 + [4] * WINDOW) == 4
    assert found([4] * 30 + [90] * WINDOW) == 100


@given(arrivals=st.lists(st.integers(-5, 200), max_size=60), every=st.integers(1, 100))
def test_it_lies_between_1_and_every_and_covers_nearly_all(arrivals, every):
    lag = found(arrivals, every)
    assert 1 <= lag <= every
    last = [min(max(positions, 1), every) for positions in arrivals[-WINDOW:]]
    assert sum(positions > lag for positions in last) <= (len(last) + 8) // 12
    again = AutoLag(every)
    again.restore(AutoLag.state(made := AutoLag(every)) + last)
    assert (made.lag, again.lag) == (1, lag)


def test_a_state_that_is_none_changes_nothing():
    lag = AutoLag(50)
    lag.observe(9)
    with pytest.raises(ValueError, match="invalid literal"):
        lag.restore([4, "many"])
    assert lag.state() == [9]


class Late(Exchange):
    """Exchange whose outcome is there after so many polls between steps; it knows when it was
    waited for in vain.
    """

    def __init__(self, after, partner=True):
        self.after, self.partner, self.waits, self.sent = after, partner, 0, []

    def start(self, contribution):
        self.sent.append(contribution.key)
        after = self.after(contribution.key) if callable(self.after) else self.after
        return LateHandle(self, [tensor.clone() for tensor in contribution.tensors], after)


class LateHandle(Handle):
    def __init__(self, exchange, tensors, left):
        self.exchange, self.tensors, self.left = exchange, tensors, left

    def done(self):
        self.left -= 1
        return self.left <= 0

    def result(self, deadline=None):
        self.exchange.waits += self.left > 0
        return Mean(self.tensors, 2.0, ("a", "b")) if self.exchange.partner else None


METHODS = {"noloco": NoLoCo, "streaming": StreamingDiLoCo}


def run(exchange, steps, every=20, method="noloco", fragments=4, tokens=0, **options):
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(4)]
    infos = []
    opt = METHODS[method](
        torch.optim.SGD(weights, lr=0.1),
        exchange,
        every=every,
        lag="auto",
        fragments=fragments,
        on_round=infos.append,
        **options,
    )
    for _ in range(steps):
        opt.count(tokens)
        opt.step()
    return opt, infos


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("after", [1, 3, 7, 16, 19])
def test_arrival_before_the_next_send_is_free(method, after):
    """Nobody waits for what arrives before its fragment is sent again."""
    opt, infos = run(exchange := Late(after), 200, method=method)
    assert exchange.waits == 0
    assert opt.lag_auto
    assert opt.lag == min(after + after // 8, 20)
    first, *rest = infos
    assert (first.lag, first.late) == (after, after > 1)
    assert all(info.lag == after and not info.late for info in rest[len(rest) // 2 :])
    assert [info.key.round for info in infos] == list(range(len(infos)))


def test_late_arrival_waits_before_the_next_send():
    """What is later than that is waited for just before its fragment is sent again."""
    opt, infos = run(exchange := Late(1000), 200)
    assert exchange.waits == len(infos)
    assert {info.lag for info in infos} == {20}
    assert opt.lag == 20
    assert [len(opt.in_flight(fragment)) for fragment in range(4)] == [1] * 4


def test_it_follows_the_link():
    _, infos = run(Late(lambda key: 3 if key.round < 40 else 12 if key.round < 100 else 2), 900)
    lags = [info.lag for info in infos]
    assert set(lags[20:38]) == {3}
    assert set(lags[70:98]) == {12}
    assert set(lags[150:]) == {2}


def test_an_exchange_without_a_partner_teaches_nothing():
    opt, infos = run(exchange := Late(9, partner=False), 200)
    assert opt.lag == 1
    assert {info.lag for info in infos} == {9}
    assert exchange.waits == 0


def test_alone_it_is_applied_a_step_later():
    opt, infos = run(Alone(), 100)
    assert (opt.lag, {info.lag for info in infos}) == (1, {1})


@pytest.mark.parametrize("method", METHODS)
def test_lag_counts_positions(method):
    """A step of a quarter of a round: five positions, of which each sends a fragment, and applies
    one, at most.
    """
    opt, infos = run(Late(1), 40, method=method, tokens=5, length=Tokens(20))
    assert opt.position == 200
    assert {info.lag for info in infos} <= {0, 1}
    clock = iter(range(10_000))
    opt, infos = run(
        exchange := Late(2), 60, method=method, length=Seconds(10.0, lambda: float(next(clock)))
    )
    assert exchange.waits == 0
    assert opt.round > 12
    assert infos[-1].lag <= 1


def test_polls_stop_on_arrival():
    """Polls stop once it is there and a simulation may skip quiet steps."""
    opt, _ = run(Alone(), 6)
    assert opt.position == 6
    assert opt.quiet(100) == 4  # the next fragment is sent after step 10
    assert opt.quiet(3) == 3
    opt, _ = run(Late(3), 5)
    assert (opt.in_flight(0), opt.quiet(100)) == ([0], 1)
    fixed = StreamingDiLoCo(
        torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1),
        Alone(),
        every=9,
        fragments=1,
        lag=2,
    )
    assert fixed.quiet(100) == 9
    assert not fixed.lag_auto
    assert fixed.lag == 2


@pytest.mark.parametrize(("method", "more"), [("noloco", 0.0), ("streaming", 4 * 6.5)])
def test_distant_peers_start_exchanges_in_one_order(method, more):
    """Virtual time: a step takes 1 s, and what anna sends needs 6.5 s.

    The lag of bo is 13 at first.

    They begin with other weights, which streaming makes equal by a second exchange for each
    fragment, waited for; between processes of torch.distributed another order of exchanges would be
    a deadlock.
    """

    def peer(exchange):
        weights = [
            torch.nn.Parameter(torch.full((2,), float(len(exchange.peer)))) for _ in range(4)
        ]
        infos, order, began = [], [], exchange.simulation.now
        real = exchange.start
        exchange.start = lambda mine: [order.append((mine.key, bool(mine.members))), real(mine)][1]
        opt = METHODS[method](
            torch.optim.SGD(weights, lr=0.0),
            exchange,
            every=16,
            lag="auto",
            fragments=4,
            on_round=infos.append,
        )
        if exchange.peer == "bo":
            opt._auto.observe(12)
        for _ in range(160):
            exchange.sleep(1.0)
            opt.step()
        seconds = exchange.simulation.now - began
        opt.finish()
        return infos, seconds, opt.lag, torch.cat(weights).detach(), order

    far = Faults(delay=lambda peer, key: 6.5 if peer == "anna" else 0.0)
    found = Simulation(["anna", "bo"], faults=far, wait=100.0).run(peer)
    for infos, seconds, lag, _, order in found.values():
        assert seconds == 160.0 + more
        assert all(len(info.members) == 2 for info in infos)
        assert lag == 7
        assert order == found["anna"][-1]
    apart = (found["anna"][3] - found["bo"][3]).abs().max()
    assert apart < (1e-6 if more else 0.3)


def test_the_lags_of_shards_of_a_peer_are_fixed():
    class Shards(Alone):
        shards = 2

    opt, _ = run(Shards(), 60)
    assert (opt.lag_auto, opt.lag) == (False, 1)


def test_arrivals_are_resumed():
    """A resumed run knows the arrivals and a state of before there were any is loaded."""
    opt, _ = run(Late(7), 200)
    again, _ = run(Late(7), 0)
    again.load_state_dict(opt.state_dict())
    assert again.lag == opt.lag == 7
    state = opt.whole_state()
    for wrong in (["x"], None):
        with pytest.raises((ValueError, TypeError)):
            again.load_state_dict({**state, "arrivals": wrong})
    assert again.lag == 7
    del state["arrivals"]
    again.load_state_dict(state)
    assert again.lag == 1
