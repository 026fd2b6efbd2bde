"""What a chaos run came to, from times that are known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.chaos import figures
from bench.chaos.figures import Life

exactly = pytest.approx


def life(peer=0, times=(), *, first=1, **more):
    return Life(peer, more.pop("spawned", 0.0), steps=[(at, first + number) for number, at in enumerate(times)], **more)


def test_a_stall_is_the_longest_time_between_two_steps():
    assert figures.longest_gap(life(times=[1, 2, 5, 6]), 6.5) == 3


def test_time_in_which_we_stopped_the_node_is_no_stall_but_what_it_needed_after_that_is():
    assert figures.longest_gap(life(times=[1, 2, 8, 9], stopped=[(2.5, 6.5)]), 9) == exactly(2)


def test_who_hangs_until_the_end_stalls_and_who_is_dead_does_not():
    assert figures.longest_gap(life(times=[1, 2]), 9) == 7
    assert figures.longest_gap(life(times=[1, 2], ended=3.0), 9) == 1
    assert figures.longest_gap(life(), 9) is None


def test_the_speed_counts_only_seconds_in_which_somebody_could_train():
    dead = life(times=[10, 11, 12], ended=12.0)
    slept = life(1, times=[10, 11, 18, 19, 20], stopped=[(11.0, 17.0)])
    assert figures.speed([dead, slept], 20) == exactly((2 + 4) / (2 + 4))
    assert figures.speed([life(spawned=5.0, times=[10, 11])], 11, with_starts=True) == exactly(2 / 6)
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
