"""Where others expect a loop of one's own at its end."""

import pytest

from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.training.loop_end import LoopEnd


class Expected:
    """What the last average is told of this loop's end."""

    def __init__(self):
        self.step = "untold"

    def ends_at(self, step):
        self.step = step


@pytest.fixture
def end():
    made = LoopEnd(OuterSettings(), None)
    made.last = Expected()
    return made


def test_a_loop_is_expected_at_the_swarms_steps(end):
    """Mutant: a number that is not set is taken for an end at step 0."""
    end.follow(0, 3)
    assert end.last.step is None
    for steps in (3, 9, 10):
        end.follow(10, steps)
        assert end.last.step == 10


def test_a_loop_that_a_change_ended_late_ended_there(end):
    """`shoal end` may set fewer steps than the loop has done: it ends past them."""
    end.follow(0, 12)
    end.follow(10, 12)
    assert end.last.step == 10


def test_a_loop_that_trains_beyond_ends_where_it_likes(end):
    """Fault: who is as far beyond would be waited for ten seconds only, however near its end."""
    end.follow(10, 10)
    end.follow(10, 11)
    assert end.last.step is None


def test_a_later_end_is_expected_again(end):
    for steps in (10, 11):
        end.follow(10, steps)
    for steps in (12, 13):
        end.follow(20, steps)
    assert end.last.step == 20


def test_another_rank_than_the_first_expects_nothing():
    """It has no last average of its own. Mutant: it is told all the same."""
    LoopEnd(OuterSettings(), None).follow(10, 10)
