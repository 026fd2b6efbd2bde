"""How much checking may take, by a clock that the tests set."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.node.verify.audit import Budget


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def test_what_is_spent_comes_back_within_a_minute_and_no_more_is_saved():
    clock = Clock()
    budget = Budget(6.0, clock)
    assert budget.is_open
    budget.spend(6.0)
    assert not budget.is_open
    clock.now += 0.1
    assert budget.is_open
    clock.now += 3600.0
    assert budget.is_open
    budget.spend(6.0)  # an hour of rest is worth one minute
    assert not budget.is_open
    assert budget.spent == 12.0


def test_a_check_that_took_too_long_is_paid_for():
    clock = Clock()
    budget = Budget(6.0, clock)
    budget.spend(18.0)
    for _ in range(119):  # 12 seconds too much are two minutes
        clock.now += 1.0
        assert not budget.is_open
    clock.now += 2.0
    assert budget.is_open


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 5)), max_size=50), st.floats(0.1, 60))
def test_in_the_long_run_no_more_is_spent_than_allowed(steps, seconds):
    clock = Clock()
    budget, began, most = Budget(seconds, clock), clock.now, 0.0
    for wait, takes in steps:
        clock.now += wait
        if budget.is_open:
            budget.spend(takes)
            most = max(most, takes)
    allowed = seconds + (clock.now - began) * seconds / 60
    assert budget.spent <= allowed + most + 1e-6
