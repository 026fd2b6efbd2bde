"""Real nodes, some of which are ten or four times as quick as another, in rounds of seconds and in
a group.
"""

import itertools
import re
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


@pytest.mark.slow(reason="real nodes wait for each other")
def test_quick_members_of_a_group_name_the_slow_one(shoal, eventually):
    """The fault: the network was blamed, for exchanges take longer than a round."""
    table = shoal.toml(
        swarm={"name": "uneven", "start_when": 3},
        outer={"method": "streaming", "codec": "sign+ef", "every": 16},
        options={"quick_s": 0.02, "slow_s": 0.08},
    )
    quick = shoal.node("up", table, "quick", "--task", TASK, "--shard", "0/2")
    link = quick.line()
    other = shoal.node("join", link, "other", "--task", TASK, "--shard", "0/2")
    slow = shoal.node("join", link, "slow", "--task", TASK, "--shard", "1/2")
    named = "slow is slow: an inner step takes it "
    eventually(
        lambda: all(named in node.said() for node in (quick, other)), 60, "the slow one's name"
    )
    shoal.interrupt(slow, other, quick)
    assert "is slow: " not in slow.said()
    for node in (quick, other, slow):
        assert "Exchanges take this node longer" not in node.said()
    (said,) = [line for line in quick.said().splitlines() if named in line]
    slow_ms, own_ms, percent = map(
        float,
        re.search(
            r"takes it ([\d.]+) ms and this node ([\d.]+) ms, .* computes (\d+) % of", said
        ).groups(),
    )
    assert slow_ms > 2 * own_ms
    assert abs(percent / 100 - own_ms / slow_ms) < 0.15


def test_a_round_that_is_none_is_said_before_anything_starts(shoal):
    error = shoal.start("up", "--round", "seconds:0").error()
    assert (
        error
        == "The setting outer.round='seconds:0' cannot be used: a round must take between 0.1 and "
        "86400 seconds."
    )
