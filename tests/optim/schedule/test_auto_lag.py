"""The lag that follows the arrivals: the least with which nearly all exchanges are in time; the optimizer that uses it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.optim import Alone, Faults, NoLoCo, Seconds, Simulation, StreamingDiLoCo, Tokens
from shoal.optim.exchange.base import Exchange, Handle, Mean
from shoal.optim.schedule import WINDOW, AutoLag


def found(arrivals, every=100):
    lag = AutoLag(every)
    for positions in arrivals:
        lag.observe(positions)
    return lag.lag


def test_without_any_arrival_it_is_1():
    assert found([]) == 1


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
def test_it_is_the_least_with_which_nearly_all_are_in_time_and_an_eighth(arrivals, lag):
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
    """Exchange whose outcome is there after so many polls between steps; it knows when it was waited for in vain."""

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
    opt = METHODS[method](torch.optim.SGD(weights, lr=0.1), exchange, every=every, lag="auto", fragments=fragments,
                          on_round=infos.append, **options)  # fmt: skip
    for _ in range(steps):
        opt.count(tokens)
        opt.step()
    return opt, infos


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("after", [1, 3, 7, 16, 19])
def test_nobody_waits_for_what_arrives_before_its_fragment_is_sent_again(method, after):
    opt, infos = run(exchange := Late(after), 200, method=method)
    assert exchange.waits == 0
    assert opt.lag_auto
    assert opt.lag == min(after + after // 8, 20)
    first, *rest = infos
    assert (first.lag, first.late) == (after, after > 1)
    assert all(info.lag == after and not info.late for info in rest[len(rest) // 2 :])
    assert [info.key.round for info in infos] == list(range(len(infos)))


def test_what_is_later_than_that_is_waited_for_just_before_its_fragment_is_sent_again():
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
def test_in_rounds_of_tokens_or_seconds_the_lag_is_in_positions(method):
    """A step of a quarter of a round: five positions, of which each sends a fragment, and applies one, at most."""
    opt, infos = run(Late(1), 40, method=method, tokens=5, length=Tokens(20))
    assert opt.position == 200
    assert {info.lag for info in infos} <= {0, 1}
    clock = iter(range(10_000))
    opt, infos = run(exchange := Late(2), 60, method=method, length=Seconds(10.0, lambda: float(next(clock))))
    assert exchange.waits == 0
    assert opt.round > 12
    assert infos[-1].lag <= 1


def test_polls_stop_once_it_is_there_and_a_simulation_may_skip_quiet_steps():
    opt, _ = run(Alone(), 6)
    assert opt.position == 6
    assert opt.quiet(100) == 4  # the next fragment is sent after step 10
    assert opt.quiet(3) == 3
    opt, _ = run(Late(3), 5)
    assert (opt.in_flight(0), opt.quiet(100)) == ([0], 1)
    fixed = StreamingDiLoCo(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1), Alone(), every=9, fragments=1, lag=2)
    assert fixed.quiet(100) == 9
    assert not fixed.lag_auto
    assert fixed.lag == 2


@pytest.mark.parametrize(("method", "more"), [("noloco", 0.0), ("streaming", 4 * 6.5)])
def test_peers_at_unequal_distance_meet_each_in_its_own_time_and_begin_their_exchanges_in_the_same_order(method, more):
    """Virtual time: a step takes 1 s, and what anna sends needs 6.5 s. The lag of bo is 13 at first.

    They begin with other weights, which streaming makes equal by a second exchange for each fragment, waited for; between processes
    of torch.distributed another order of exchanges would be a deadlock.
    """

    def peer(exchange):
        weights = [torch.nn.Parameter(torch.full((2,), float(len(exchange.peer)))) for _ in range(4)]
        infos, order, began = [], [], exchange.simulation.now
        real = exchange.start
        exchange.start = lambda mine: [order.append((mine.key, bool(mine.members))), real(mine)][1]
        opt = METHODS[method](torch.optim.SGD(weights, lr=0.0), exchange, every=16, lag="auto", fragments=4, on_round=infos.append)
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


def test_a_resumed_run_knows_the_arrivals_and_a_state_of_before_there_were_any_is_loaded():
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
