"""The report of a chaos run, from runs that are known."""

import pytest

from bench.chaos.figures import Life
from bench.chaos.report import report, summary
from bench.chaos.run import ProcessSample, RunObservations


def life(peer, begin, end, *, spawned=0.0, first=1, **more):
    """A step a second."""
    return Life(peer, spawned, steps=[(float(at), first + at - begin) for at in range(begin, end + 1)], **more)


def events(*rounds):
    return [{"event": "start", "loss_first": 5.0, "time": 9.0}, *({"event": "round", "time": t, "loss": v} for t, v in rounds)]


@pytest.fixture
def harmed():
    """Of three nodes the last is hostile; the first is killed at 50 and trains again at 60."""
    return RunObservations(
        begin=10.0,
        until=110.0,
        lives=[
            life(0, 10, 50, ended=50.0, killed=True),
            life(1, 10, 110),
            life(2, 10, 30),  # hangs, which is its own affair
            life(0, 60, 110, spawned=55.0, first=38, resumed=True, joined=62.0),
        ],
        kills=[(0, 50.0)],
        samples={1: [ProcessSample(float(at), 100.0 + at / 60, None, 20.0) for at in range(10, 110, 2)]},
        events={0: events((20.0, 4.0), (105.0, 2.0)), 1: events((20.0, 3.0)), 2: events((20.0, 90.0))},
        losses={0: 2.0, 1: 3.0},
    )


@pytest.fixture
def clean():
    return RunObservations(begin=10.0, until=110.0, lives=[life(0, 10, 110)], events={0: events()}, losses={0: 2.5})


def test_everything_that_is_promised(harmed, clean):
    found = report(harmed, clean, hostile={2}, deadline=10.0, seconds=100.0)
    assert (found["kills"], found["rejoins"], found["steps_lost"], found["orphans"]) == (1, 1, 0, 0)
    assert found["max_stall_s"] == found["median_stall_s"] == 1
    assert found["beyond_deadline_s"] == 0
    assert found["steps_lost_by_killed"] == 4  # 41 were done, and it went on with the 38th
    assert (found["loss_first"], found["loss_last"]) == (5.0, 2.5)
    assert found["loss_curve"] == [None, 3.5, None, None, None, None, None, None, None, 2.0]
    assert found["throughput_kept"] == pytest.approx(1.0)
    assert 0.95 < found["throughput_kept_with_starts"] < 1
    assert found["rss_slope"] == pytest.approx(1.0)
    assert found["daemon_rss_slope"] is None
    assert found["fd_slope"] == pytest.approx(0.0)
    assert (found["start_s"], found["join_s"], found["join_max_s"]) == (5.0, 7.0, 7.0)
    assert found["resume_s"] == found["resume_max_s"] == 1.0
    assert found["unharmed"]["loss_last"] == 2.5
    assert found["troubles"] == []


def test_what_went_wrong_is_said(harmed):
    harmed.orphans, harmed.losses = ["process 7"], {}
    found = report(harmed, None, hostile=set(), deadline=10.0, seconds=100.0)
    assert found["troubles"] == ["no honest node saved weights in the end"]
    assert found["orphans"] == 1
    assert found["throughput_kept"] is None
    assert found["max_stall_s"] == 80.0  # now the one that hangs counts
    assert found["beyond_deadline_s"] == 70.0


def test_a_table_for_people(harmed, clean):
    found = report(harmed, clean, hostile={2}, deadline=10.0, seconds=100.0)
    whole = {"peers": 3, "byzantine": 1, "lie": "nan", "minutes": 1.5, "method": "noloco", "seed": 7, **found}
    shown = summary(whole)
    assert "3 nodes, 1 hostile (nan), 1.5 min of noloco, seed 7" in shown
    assert "100.0%" in shown
    whole.update(unharmed=None, throughput_kept=None, throughput_kept_with_starts=None, troubles=["peer-1 ended"])
    assert summary(whole).endswith("trouble: peer-1 ended")
