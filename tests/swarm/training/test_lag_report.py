"""What a node reports of the lag of its exchanges, and when it warns that they take longer than a round."""

from types import SimpleNamespace

import pytest

from shoal.optim import RoundInfo, RoundKey
from shoal.swarm.training.lag_report import FULL, LagReport


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
    assert "longer than a round, so training waits for each (3 s of late)" in sentence
    assert "`shoal plan`" in sentence
    for _ in range(2 * FULL):
        over(report)
    assert report.events() == []


@pytest.mark.parametrize(
    "harmless",
    [{"members": ()}, {"members": ("a",)}, {"wait_s": 0.0}],
)
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
