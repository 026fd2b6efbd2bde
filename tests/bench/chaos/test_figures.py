"""A chaos run: its plan, what a node does in it, what it came to and its report, from runs that are
known.
"""

import os
import subprocess
import sys
import time
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.chaos import actor, figures, processes
from bench.chaos.actor_options import LIES
from bench.chaos.figures import Life
from bench.chaos.plan import draw_plan
from bench.chaos.report import report, summary
from bench.chaos.run import ProcessSample, RunObservations, first_accepted, read_events
from shoal.node.training.trainer import Trainer
from shoal.optim.exchange.base import Contribution, Mean, RoundKey

exactly = pytest.approx


def life(peer=0, times=(), *, first=1, **more):
    return Life(
        peer,
        more.pop("spawned", 0.0),
        steps=[(at, first + number) for number, at in enumerate(times)],
        **more,
    )


def test_a_stall_is_the_longest_time_between_two_steps():
    assert figures.longest_gap(life(times=[1, 2, 5, 6]), 6.5) == 3


def test_paused_time_is_no_stall():
    """Time in which we stopped the node is no stall but what it needed after that is."""
    assert figures.longest_gap(life(times=[1, 2, 8, 9], stopped=[(2.5, 6.5)]), 9) == exactly(2)


def test_hanging_to_the_end_is_a_stall():
    """Who hangs until the end stalls and who is dead does not."""
    assert figures.longest_gap(life(times=[1, 2]), 9) == 7
    assert figures.longest_gap(life(times=[1, 2], ended=3.0), 9) == 1
    assert figures.longest_gap(life(), 9) is None


def test_the_speed_counts_only_seconds_in_which_somebody_could_train():
    dead = life(times=[10, 11, 12], ended=12.0)
    slept = life(1, times=[10, 11, 18, 19, 20], stopped=[(11.0, 17.0)])
    assert figures.speed([dead, slept], 20) == exactly((2 + 4) / (2 + 4))
    assert figures.speed([life(spawned=5.0, times=[10, 11])], 11, with_starts=True) == exactly(
        2 / 6
    )
    assert figures.speed([life()], 20) is None


def test_steps_after_the_end_do_not_count():
    assert figures.speed([life(times=[0, 1, 2, 3])], 2.0) == exactly(1)


def test_a_node_that_goes_back_has_lost_steps():
    assert figures.steps_lost([life(times=[1, 2, 3])]) == 0
    assert figures.steps_lost([Life(0, 0.0, steps=[(1, 10), (2, 11), (3, 8)])]) == 4


def test_a_killed_node_loses_what_it_did_since_its_checkpoint():
    before = life(times=[1, 2, 3], first=8, killed=True)  # 8, 9, 10
    assert figures.steps_lost_by_kills([before, life(times=[9], first=6, resumed=True)]) == 5
    assert figures.steps_lost_by_kills([before, life(times=[9], first=11, resumed=True)]) == 0
    assert figures.steps_lost_by_kills([before, life(times=[9], first=1)]) == 0  # it began anew


def test_the_last_survivors_next_step_after_a_kill():
    lives = [
        life(0, [1, 2], ended=2.5, killed=True),
        life(1, [1, 2, 3]),
        life(2, [1, 2, 6]),
        life(3, [4]),  # had not begun
        life(4, [1, 2, 60], stopped=[(2.2, 50)]),
        life(5, [1, 2], ended=3.0),
    ]
    assert figures.next_step_s(lives, 0, 2.5) == exactly(3.5)
    assert figures.next_step_s(lives[:1], 0, 2.5) is None


def test_restarts_are_all_lives_but_the_first():
    first, other, second = life(0), life(1), life(0, spawned=9.0)
    assert figures.restarts([first, other, second]) == [second]


@given(st.floats(-10, 10), st.lists(st.floats(0, 1000), min_size=1, max_size=4))
def test_a_common_slope_is_found_whatever_the_levels_are(a_minute, levels):
    series = [[(at, level + a_minute * at / 60) for at in range(0, 120, 7)] for level in levels]
    assert figures.slope(series) == exactly(a_minute, abs=1e-6)


def test_no_slope_without_two_times():
    assert figures.slope([[], [(1.0, 2.0)], [(1.0, 2.0), (1.0, 3.0)]]) is None


def test_means_by_parts_of_the_run():
    points = [(0.0, 4.0), (0.5, 2.0), (3.9, 1.0), (4.0, 100.0), (-1.0, 100.0)]
    assert figures.binned(points, 0.0, 4.0, bins=4) == [3.0, None, None, 1.0]


def test_overlaps():
    assert figures.overlap([(0, 2), (5, 9)], 1, 6) == 2
    assert figures.overlap([(0, 2)], 3, 4) == 0


plans = st.fixed_dictionaries(
    {
        "peers": st.integers(2, 12),
        "seconds": st.floats(10, 1800),
        "kills_per_minute": st.floats(0, 20),
        "stops_per_minute": st.floats(0, 5),
        "seed": st.integers(0, 2**32),
    }
)


@settings(deadline=None)
@given(plans)
def test_plan_follows_its_seed_and_spares_half(how):
    """A plan follows from its seed and leaves half of the nodes alone."""
    plan = draw_plan(**how)
    assert plan == draw_plan(**how)
    assert [hit.at_s for hit in plan] == sorted(hit.at_s for hit in plan)
    for number, hit in enumerate(plan):
        assert 0 < hit.at_s < how["seconds"]
        assert 0 <= hit.peer < how["peers"]
        assert hit.seconds > 0
        down = {other.peer for other in plan[:number] if other.at_s + other.seconds > hit.at_s}
        assert hit.peer not in down
        assert len(down) + 1 <= max(how["peers"] // 2, 1)


def test_kill_rate_is_kept_and_includes_the_creator():
    """Two kills a minute are two kills a minute and the creators turn comes."""
    for seed in range(50):
        plan = draw_plan(peers=8, seconds=300, kills_per_minute=2, stops_per_minute=0, seed=seed)
        assert [hit.kind for hit in plan] == ["kill"] * 10
        assert {hit.peer for hit in plan[:8]} == set(range(8))
        few = draw_plan(peers=8, seconds=120, kills_per_minute=2, stops_per_minute=1, seed=seed)
        killed = [hit.peer for hit in few if hit.kind == "kill"]
        assert (len(few), len(killed), len(set(killed))) == (6, 4, 4)
        assert 0 in killed


def test_nothing_happens_where_nothing_is_asked_for():
    assert draw_plan(peers=2, seconds=60, kills_per_minute=0, stops_per_minute=0, seed=0) == []


@pytest.mark.parametrize(
    "wrong", [{"peers": 1}, {"seconds": 0}, {"kills_per_minute": -1}, {"stops_per_minute": -1}]
)
def test_what_makes_no_plan(wrong):
    how = {"peers": 2, "seconds": 60, "kills_per_minute": 1, "stops_per_minute": 1, "seed": 0}
    with pytest.raises(ValueError):
        draw_plan(**{**how, **wrong})


def story_life(peer, begin, end, *, spawned=0.0, first=1, **more):
    """A step a second."""
    return Life(
        peer,
        spawned,
        steps=[(float(at), first + at - begin) for at in range(begin, end + 1)],
        **more,
    )


def events(*rounds):
    return [
        {"event": "start", "loss": {"held_out_first": 5.0}, "time": 9.0},
        *({"event": "round", "time": t, "loss": v} for t, v in rounds),
    ]


@pytest.fixture
def harmed():
    """Of three nodes the last is hostile; the first is killed at 50 and trains again at 60."""
    return RunObservations(
        begin=10.0,
        until=110.0,
        lives=[
            story_life(0, 10, 50, ended=50.0, killed=True),
            story_life(1, 10, 110),
            story_life(2, 10, 30),  # hangs, which is its own affair
            story_life(0, 60, 110, spawned=55.0, first=38, resumed=True, joined=62.0),
        ],
        kills=[(0, 50.0)],
        samples={
            1: [ProcessSample(float(at), 100.0 + at / 60, None, 20.0) for at in range(10, 110, 2)]
        },
        events={
            0: events((20.0, 4.0), (105.0, 2.0)),
            1: events((20.0, 3.0)),
            2: events((20.0, 90.0)),
        },
        losses={0: 2.0, 1: 3.0},
    )


@pytest.fixture
def clean():
    return RunObservations(
        begin=10.0,
        until=110.0,
        lives=[story_life(0, 10, 110)],
        events={0: events()},
        losses={0: 2.5},
    )


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
    whole = {
        "peers": 3,
        "byzantine": 1,
        "lie": "nan",
        "minutes": 1.5,
        "method": "noloco",
        "seed": 7,
        **found,
    }
    shown = summary(whole)
    assert "3 nodes, 1 hostile (nan), 1.5 min of noloco, seed 7" in shown
    assert "100.0%" in shown
    whole.update(
        unharmed=None,
        throughput_kept=None,
        throughput_kept_with_starts=None,
        troubles=["peer-1 ended"],
    )
    assert summary(whole).endswith("trouble: peer-1 ended")


def heard_by_others(how):
    """What each of two rounds sends, and what the liar gets back."""

    class Exchange:
        sent: ClassVar = []

        def start(self, contribution):
            self.sent.append([tensor.tolist() for tensor in contribution.tensors])
            return Answer()

    class Answer:
        def done(self):
            return True

        def result(self, deadline):
            return Mean([torch.zeros(2)], 2.0, ("a", "b"))

    actor.lie(actor.LIES[how], [Exchange])
    for number in range(2):
        handle = Exchange().start(
            Contribution(RoundKey("run", number), [torch.tensor([1.0, 2.0 + number])])
        )
        assert handle.done()
        assert handle.result() is None
    return Exchange.sent


def test_the_command_offers_what_the_actor_can_tell():
    assert tuple(actor.LIES) == LIES


@pytest.mark.parametrize(
    ("how", "second"),
    [("sign-flip", [-1.0, -3.0]), ("x1000", [1000.0, 3000.0]), ("stale", [1.0, 2.0])],
)
def test_a_liar_sends_something_else_and_learns_nothing(how, second):
    assert heard_by_others(how)[1] == [second]


def test_nan():
    assert all(value != value for value in heard_by_others("nan")[0][0])


def test_each_step_is_noted_and_takes_its_time(tmp_path, monkeypatch):
    class Fake:
        steps, done = 0, []

        @property
        def opt(self):
            return self

        def _waited(self):
            return 0.0

    def step(self):
        Fake.steps += 1

    slept = []
    monkeypatch.setattr(Trainer, "step", step)
    monkeypatch.setattr(time, "sleep", slept.append)
    actor.keep_time(tmp_path / "log", 0.5)
    for _ in range(3):
        Trainer.step(Fake())
    lines = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert [int(step) for _, step in lines] == [1, 2, 3]
    assert [float(at) for at, _ in lines] == sorted(float(at) for at, _ in lines)
    assert slept[0] == 0.5
    assert all(0.4 < seconds <= 0.5 for seconds in slept)


def test_what_the_kernel_knows_of_this_process(monkeypatch):
    child = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "SHOAL_TEST": "mark"},
    )
    try:
        child.stdout.readline()
        if not processes.PROC.exists():
            pytest.skip("this system has no /proc")
        assert processes.resident_mb(child.pid) > 1
        assert processes.descriptors(child.pid) >= 3
        assert child.pid in processes.descendants(os.getpid())
        assert processes.marked("SHOAL_TEST=mark") == [child.pid]
    finally:
        child.communicate(b"\n")
    assert processes.resident_mb(child.pid) is None
    assert processes.descriptors(child.pid) is None
    assert processes.marked("SHOAL_TEST=mark") == []


def test_cut_off_metrics_line_is_left_out(tmp_path):
    """A line of metrics that a kill cut off is left out."""
    path = tmp_path / "metrics.jsonl"
    assert read_events(path) == []
    line = '{"event": "round", "partner": "b", "time": 5}'
    lines = [line.replace("5", "1").replace('"b"', "null"), line[:9], line, ""]
    path.write_text("\n".join(lines))
    events = read_events(path)
    assert len(events) == 2
    assert first_accepted(events, 0, 9) == 5
    assert first_accepted(events, 6, 9) is None
    assert first_accepted(events, 0, 5) is None
