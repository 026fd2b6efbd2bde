"""Two real nodes, one ten times as quick as the other, in rounds of seconds."""

import itertools
import signal
from pathlib import Path

import pytest

TASK = f"{Path(__file__).parent / 'uneven_task.py'}:Uneven"
ROUNDS = 5


@pytest.mark.slow(reason="rounds are seconds of real time")
@pytest.mark.parametrize("length", ["seconds:1", "seconds:auto"])
def test_a_quick_and_a_slow_node_exchange_in_every_round(shoal, eventually, length):
    table = shoal.toml(swarm={"name": "uneven", "start_when": 2}, outer={"round": length})
    quick = shoal.node("up", table, "quick", "--task", TASK, "--shard", "0/2")
    link = quick.line()
    slow = shoal.node("join", link, "slow", "--task", TASK, "--shard", "1/2")
    eventually(
        lambda: min(len(shoal.rounds(name)) for name in ("quick", "slow")) >= ROUNDS,
        60,
        "five rounds",
    )
    slow.signal(signal.SIGINT)
    quick.signal(signal.SIGINT)
    assert (slow.wait(), quick.wait()) == (130, 130)

    met = {
        name: {event["round"]: event for event in shoal.rounds(name)} for name in ("quick", "slow")
    }
    # The very last one may be the round in which the other was told to stop.
    common = sorted(set(met["quick"]) & set(met["slow"]))[: ROUNDS - 1]
    assert common == list(range(common[0], common[0] + ROUNDS - 1))
    assert common[0] <= 1
    assert {met["quick"][number]["partner"] for number in common} == {"slow"}
    assert {met["slow"][number]["partner"] for number in common} == {"quick"}
    steps = {name: [met[name][number]["step"] for number in common] for name in met}
    made = {
        name: [later - earlier for earlier, later in itertools.pairwise(ends)]
        for name, ends in steps.items()
    }
    assert all(q > s >= 1 for q, s in zip(made["quick"], made["slow"], strict=True))
    assert shoal.left() == []


@pytest.mark.slow(reason="rounds are seconds of real time")
def test_sleeper_goes_on_in_the_present_round(shoal, eventually):
    """A node that slept goes on in the round that the swarm is in."""
    table = shoal.toml(
        swarm={"name": "uneven", "start_when": 2}, outer={"round": "seconds:1", "wait_s": 1.0}
    )
    awake = shoal.node("up", table, "awake", "--task", TASK, "--shard", "0/2")
    sleeper = shoal.node("join", awake.line(), "sleeper", "--task", TASK, "--shard", "1/2")
    eventually(
        lambda: any(event["partner"] for event in shoal.rounds("sleeper")), 60, "an exchange"
    )
    sleeper.signal(signal.SIGSTOP)
    before = len(shoal.rounds("awake"))
    eventually(lambda: len(shoal.rounds("awake")) >= before + 4, 60, "four rounds alone")
    last = shoal.rounds("sleeper")[-1]["round"]
    sleeper.signal(signal.SIGCONT)

    def met():
        """The rounds since then in which both say that they exchanged."""
        mine, theirs = (
            {e["round"] for e in shoal.rounds(name) if e["partner"]}
            for name in ("awake", "sleeper")
        )
        return sorted(number for number in mine & theirs if number > last + 1)

    eventually(lambda: len(met()) >= 3, 60, "three exchanges")
    assert met()[0] >= last + 4  # the rounds in between passed without it
    sleeper.signal(signal.SIGINT)
    awake.signal(signal.SIGINT)
    assert (sleeper.wait(), awake.wait()) == (130, 130)


def test_a_round_that_is_none_is_said_before_anything_starts(shoal):
    error = shoal.start("up", "--round", "seconds:0").error()
    assert (
        error
        == "The setting outer.round='seconds:0' cannot be used: a round must take between 0.1 and "
        "86400 seconds."
    )
