"""The length of a round, from the setting; the speed that a node announces."""

import itertools

import pytest

from shoal.optim import Every, Seconds, Steps, Tokens
from shoal.optim.schedule.auto_length import LONGEST_S, SHORTEST_S
from shoal.swarm.manifest.outer import parse_round
from shoal.swarm.training.outer_factory import WINDOW, StepRate, round_length


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("steps", ("steps", None)),
        ("tokens:1", ("tokens", 1)),
        ("tokens:9007199254740992", ("tokens", 2**53)),
        ("seconds:30", ("seconds", 30.0)),
        ("seconds:0.25", ("seconds", 0.25)),
        ("seconds:auto", ("seconds", None)),
    ],
)
def test_what_a_round_may_be(text, parsed):
    assert parse_round(text) == parsed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it should be steps, tokens:N, seconds:S or seconds:auto"),
        ("steps:50", "it should be"),
        ("tokens:-1", "it should be"),
        ("tokens:1.5", "it should be"),
        ("tokens:٣", "it should be"),
        ("tokens:0", "between 1 and 9007199254740992 tokens"),
        ("tokens:9007199254740993", "between 1 and 9007199254740992 tokens"),
        ("seconds:", "it should be"),
        ("seconds:nan", "it should be"),
        ("seconds:1e9", "it should be"),
        ("seconds:10\n", "it should be"),
        ("seconds:0", "between 0.1 and 86400 seconds"),
        ("seconds:86401", "between 0.1 and 86400 seconds"),
    ],
)
def test_what_it_may_not_be(text, words):
    with pytest.raises(ValueError, match=words):
        parse_round(text)


def test_the_setting_makes_the_length():
    def clock():
        return 0.0

    assert isinstance(round_length("steps", clock, list), Steps)
    tokens = round_length("tokens:300", clock, list)
    assert isinstance(tokens, Tokens)
    assert tokens.tokens == 300
    seconds = round_length("seconds:2.5", clock, list)
    assert isinstance(seconds, Seconds)
    assert seconds.seconds == 2.5


def test_auto_asks_for_the_speeds_whenever_a_round_begins():
    now, speeds, ends, position = 1000.0, [], [], 0
    length = round_length("seconds:auto", lambda: now, lambda: speeds)
    for step in range(4000):
        now += 0.125
        if step == 400:
            speeds = [2.5, 40.0]  # four seconds for the slower one, and they are on the grid
        if step == 2000:
            speeds = [1e-6, 1e-6]
        for here in length.reached(position, Every(1), 0):
            position = here
            ends.append(now)
    early = [later - end for end, later in itertools.pairwise(ends) if later < 1050]
    middle = [later - end for end, later in itertools.pairwise(ends) if end > 1060 and later < 1250]
    assert set(early) == {SHORTEST_S}
    assert set(middle) == {4.0}
    assert ends[-1] <= 1000 + 2000 / 8 + 4.0  # and then the longest that there is
    assert LONGEST_S > 250


def test_the_speed_is_the_usual_one_of_the_last_reports():
    speed = StepRate()
    assert speed.add(1, 10.0) == 0.1
    assert speed.add(10, 1.0) == 10.0  # not slowed down by the first, in which everything warms up
    assert speed.add(20, 1.0) == 10.0
    assert [speed.add(30, 1.0) for _ in range(WINDOW)][-1] == 30.0
    assert speed.add(1, 3600.0) == 30.0  # a night's sleep


def test_reports_without_time_have_no_speed():
    speed = StepRate()
    assert speed.add(1, 0.0) == 0.0
    assert speed.add(1, -1e-9) == 0.0
    assert speed.add(1, 0.5) == 2.0
