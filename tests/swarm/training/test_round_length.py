"""The length of a round, from the setting; the speed that a node announces."""

import itertools
from types import SimpleNamespace

import pytest

from shoal.optim import Every, Seconds, Steps, Tokens
from shoal.optim.schedule.agreed_seconds import LONGEST_S, SHORTEST_S, agreed_seconds
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.settings.round_length import parse_round
from shoal.swarm.training.round_steps import announced_speeds, round_length, steps_of_rounds
from shoal.swarm.training.step_rate import MAX_REPORTS, LoopSpeed, Rates, StepRate
from tests.support.clock import Clock


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
    assert [speed.add(30, 1.0) for _ in range(MAX_REPORTS)][-1] == 30.0
    assert speed.add(1, 3600.0) == 30.0  # a night's sleep


def test_reports_without_time_have_no_speed():
    speed = StepRate()
    assert speed.add(1, 0.0) == 0.0
    assert speed.add(1, -1e-9) == 0.0
    assert speed.add(1, 0.5) == 2.0


class Node:
    """A member that sees ``speeds`` of itself ("me") and others, and has exchanged with
    ``partners``.
    """

    def __init__(self, speeds, partners=()):
        self.identity, self.host = (
            SimpleNamespace(peer_id="me"),
            SimpleNamespace(resource_manager=SimpleNamespace()),
        )
        self.host.resource_manager.partner = partners.__contains__
        self.directory = SimpleNamespace(
            members=lambda: {peer: SimpleNamespace(steps_per_s=s) for peer, s in speeds.items()}
        )

    def seconds(self):
        return agreed_seconds(announced_speeds(self))


@pytest.mark.parametrize("lie", [1e-9, 0.1, 1e9])
def test_made_up_records_move_a_round_eightfold_at_most(lie):
    """The fault: a hundred free records made rounds of ten minutes, or of one second, of those of
    three honest peers.
    """
    honest = {"me": 2.0, "a": 1.0, "b": 2.0, "c": 4.0}
    usual = Node(honest).seconds()
    attacked = honest | {f"made up {number}": lie for number in range(100)}
    assert usual / 8 <= Node(attacked, ("a", "b", "c")).seconds() <= 8 * usual
    assert Node(attacked).seconds() <= 256 * agreed_seconds([2.0])  # a newcomer, by its own speed
    assert Node(attacked | {"me": 0.0}).seconds() == agreed_seconds(
        attacked.values()
    )  # not measured yet


def test_honest_peers_agree_whomever_they_have_met():
    speeds = {"me": 1.0, **{f"peer {number}": 2.0 ** (number % 4) for number in range(40)}}
    lengths = {
        Node(speeds, [f"peer {number + n}" for n in range(count)]).seconds()
        for number in range(30)
        for count in range(9)
    }
    assert lengths == {agreed_seconds(speeds.values())}


@pytest.mark.parametrize("setting", ["seconds:2.0", "tokens:100"])
def test_late_place_is_by_one_vote_a_range(setting):
    """The fault: most records said how many steps a round is, however many of them one host
    made.
    """

    def member(peer, steps):
        return SimpleNamespace(peer=peer, steps_per_s=steps, tokens_per_s=20.0)

    members = [
        *(member(f"made up {number}", 1e-3) for number in range(100)),
        member("a", 2.0),
        member("b", 2.0),
    ]
    met = {one.peer: "10.9.0.1" for one in members[:100]} | {"a": "10.1.0.1", "b": "10.2.0.1"}
    settings = OuterSettings(method="noloco", round=setting)
    assert (
        steps_of_rounds(settings, 3, members, met) == {"seconds:2.0": 12, "tokens:100": 30}[setting]
    )
    assert steps_of_rounds(settings, 3, members, {}) != steps_of_rounds(settings, 3, members, met)


def test_a_loops_speed_leaves_out_its_waiting(monkeypatch):
    """Mutants: waiting counts as training; a look without a step changes the speed; tokens of a
    look before count twice.
    """
    clock = Clock()
    monkeypatch.setattr("shoal.swarm.training.step_rate.time.monotonic", lambda: clock.now)
    speed = LoopSpeed()
    assert speed.look(0, 0, 0.0) == Rates()
    clock.now += 5.0
    assert speed.look(10, 500, 3.0) == Rates(5.0, 250.0)
    clock.now += 60.0
    assert speed.since_look() == 60.0
    assert speed.look(10, 500, 63.0) == Rates(5.0, 250.0)
    clock.now += 2.0
    assert speed.look(20, 1000, 63.0) == Rates(5.0, 250.0)


def test_loaded_steps_are_not_counted_as_speed(monkeypatch):
    """The fault: a node announced a million steps a second after it had loaded a checkpoint."""
    clock = Clock()
    monkeypatch.setattr("shoal.swarm.training.step_rate.time.monotonic", lambda: clock.now)
    speed = LoopSpeed()
    speed.restart(2000, 16_000, 1.0)
    clock.now += 2.0
    assert speed.look(2010, 16_080, 1.0) == Rates(5.0, 40.0)
