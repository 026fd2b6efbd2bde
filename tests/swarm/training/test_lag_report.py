"""What a node reports of the lag of its exchanges, and when it warns that they take longer than a round."""

from types import SimpleNamespace

import pytest

from shoal.optim import RoundInfo, RoundKey
from shoal.swarm.training.member import FULL, LagReport
from tests.clocks import Clock


def over(report, *, members=("a", "b"), wait_s=2.0, late=False):
    report.on_round(RoundInfo(RoundKey("run", 0, 0), members, 10, 10, late), wait_s)


def optimizer(lag=10, lag_auto=True, every=10):
    return SimpleNamespace(lag=lag, lag_auto=lag_auto, schedule=SimpleNamespace(every=every))


def test_it_reports_the_present_lag_and_counts_what_came_late():
    opt = optimizer(lag=3)
    report = LagReport(opt)
    assert report.details() == {"lag": 3, "lag_auto": True, "late": 0}
    for late in (True, False, True):
        over(report, late=late)
    opt.lag = 4
    assert report.details() == {"lag": 4, "lag_auto": True, "late": 2}


def test_a_node_whose_exchanges_take_longer_than_a_round_is_warned_once():
    report = LagReport(optimizer())
    for _ in range(FULL - 1):
        over(report)
        assert report.events() == []
    over(report, wait_s=10.0)
    (sentence,) = report.events()
    assert "longer than a round, so training waits for each (3 s recently)" in sentence
    assert "`shoal plan`" in sentence
    for _ in range(2 * FULL):
        over(report)
    assert report.events() == []


@pytest.mark.parametrize("harmless", [{"members": ()}, {"members": ("a",)}, {"wait_s": 0.0}])
def test_an_exchange_that_shows_nothing_of_the_kind_begins_the_count_anew(harmless):
    report = LagReport(optimizer())
    for _ in range(FULL - 1):
        over(report)
    over(report, **harmless)
    for _ in range(FULL - 1):
        over(report)
    assert report.events() == []


@pytest.mark.parametrize("changed", [{"lag": 9}, {"lag_auto": False}, {"lag": 0, "lag_auto": False}])
def test_only_a_lag_that_can_grow_no_more_is_worth_a_warning(changed):
    report = LagReport(optimizer(**changed))
    for _ in range(2 * FULL):
        over(report)
    assert report.events() == []


def rounds(rate, *, wait_s, sent, count=FULL + 1, computing_s=10.0, lag=0):
    """Return the sentences of a node with rounds of 40 steps that waits for each exchange."""
    clock = Clock()
    opt = SimpleNamespace(lag=lag, lag_auto=False, schedule=SimpleNamespace(every=40), shapes=[(250, 250), (500,)])
    report, found = LagReport(opt, lambda: rate, clock), []
    for number in range(count):
        report.on_round(RoundInfo(RoundKey("run", number, 0), ("a", "b"), 40 * number, lag, False), wait_s, sent)
        clock.now += computing_s + wait_s
        found += report.events()
    return found


def test_a_link_that_does_not_carry_the_settings_is_named_once_with_what_would_fit():
    (sentence,) = rounds(125_000.0, wait_s=24.0, sent=3_000_000, count=3 * FULL)
    assert "carries 1 Mbit/s, but these settings send 2.4 Mbit/s" in sentence
    assert "rounds of 120 inner steps (outer.every, now 40)" in sentence  # 24 s of bytes in 30 s of computing: 80 %
    assert "`shoal plan --params 63000 --mbit 1 --step 0.25`" in sentence


@pytest.mark.parametrize("harmless", [{"rate": None}, {"rate": 400_000.0}, {"wait_s": 0.0}, {"count": FULL}, {"sent": 1_200_000}])
def test_a_link_that_carries_them_or_is_not_known_is_not_named(harmless):
    assert rounds(**{"rate": 125_000.0, "wait_s": 24.0, "sent": 3_000_000} | harmless) == []
