"""Real nodes, few of them and unlike: three, one that was killed and returns to the only other, one
four times as quick, one that slept, and two with one key.
"""

import shutil
import signal
from pathlib import Path

import pytest

TASK = f"{Path(__file__).parent / 'uneven_task.py'}:Uneven"
STEP_S = 0.05
SAVES = "--set", "node.checkpoint_every_rounds=2"
WARM_UP = 2
"""Rounds of every fragment in which not all have come yet."""

LAGS = pytest.mark.parametrize("lag", ["auto", 0], ids=["overlapped", "blocking"])


def start(shoal, count, *, every, lag="auto", slow_s=STEP_S):
    """Start nodes of one swarm, all but the first with steps of ``slow_s``; return them and their
    link.
    """
    table = shoal.toml(
        swarm={"name": "few", "start_when": count},
        outer={"every": every, "lag": lag, "wait_s": 2.0},
        options={"quick_s": STEP_S, "slow_s": slow_s},
    )
    shard = "--shard", f"0/{count}"
    nodes = [shoal.node("up", table, "peer-0", "--task", TASK, "--steps", 0, *shard, *SAVES)]
    link = nodes[0].line()
    nodes += [join(shoal, link, number, count) for number in range(1, count)]
    return nodes, link


def join(shoal, link, number, count, *arguments):
    shard = "--shard", f"{number}/{count}"
    return shoal.node("join", link, f"peer-{number}", "--task", TASK, *shard, *SAVES, *arguments)


def found(events):
    """The part of these exchanges that found a partner."""
    return sum(event["partner"] is not None for event in events) / len(events)


def warm(shoal, name):
    """The exchanges of a node since all are there."""
    events = shoal.rounds(name)
    return [event for event in events if event["round"] >= WARM_UP * event["fragments"]]


def first_met(events):
    """How many rounds of every fragment went by before the first exchange with a partner."""
    place = next(place for place, event in enumerate(events) if event["partner"])
    return place / events[0]["fragments"]


@pytest.mark.slow(reason="real nodes train for half a minute")
@LAGS
def test_three_nodes_all_exchange(shoal, eventually, lag):
    """Nobody is left over: before chains a third of the exchanges found nobody."""
    nodes, _ = start(shoal, 3, every=10, lag=lag)
    names = [f"peer-{number}" for number in range(3)]
    eventually(lambda: min(len(warm(shoal, name)) for name in names) >= 20, 120, "rounds")
    shoal.interrupt(*reversed(nodes))
    for name in names:
        events = warm(shoal, name)[:20]
        assert found(events) >= 0.9
        assert {event["members"] for event in events} >= {2, 3}


@pytest.mark.slow(reason="real nodes train for half a minute")
@LAGS
def test_killed_node_meets_the_only_other_again(shoal, eventually, lag):
    """After two rounds at most; one trained on for 400 steps without."""
    (first, second), link = start(shoal, 2, every=20, lag=lag)
    eventually(lambda: len(warm(shoal, "peer-1")) >= 4, 120, "rounds together")
    second.signal(signal.SIGKILL)
    second.wait()
    done, alone = len(shoal.rounds("peer-1")), len(shoal.rounds("peer-0"))
    eventually(lambda: len(shoal.rounds("peer-0")) >= alone + 6, 120, "rounds alone")
    said = {event["why"] for event in shoal.rounds("peer-0")[alone:]}
    assert said <= {
        "peer-1 could not be reached",
        "peer-1 could not be reached before, and is passed over for a while",
        "nobody else is here",
        "peer-1 broke off",
        "",
    }
    again = join(shoal, link, 1, 2, "--resume")
    eventually(lambda: len(shoal.rounds("peer-1")) >= done + 10, 120, "rounds since")
    shoal.interrupt(again, first)
    since = shoal.rounds("peer-1")[done:]
    assert first_met(since) <= 2
    assert found(since) >= 0.6


@pytest.mark.slow(reason="real nodes train for half a minute")
@LAGS
def test_quick_and_slow_nodes_find_partners(shoal, eventually, lag):
    """A node with four inner steps in the time of one meets the slow one in each of its rounds."""
    nodes, _ = start(shoal, 2, every=10, lag=lag, slow_s=4 * STEP_S)
    eventually(lambda: len(warm(shoal, "peer-1")) >= 12, 180, "rounds")
    shoal.interrupt(*nodes)
    quick = warm(shoal, "peer-0")
    slow = warm(shoal, "peer-1")[:12]
    assert found(slow) >= 0.9
    assert sum(event["partner"] is not None for event in quick) >= 0.9 * len(slow)


@pytest.mark.slow(reason="real nodes train for a minute")
def test_node_asleep_is_met_when_it_wakes(shoal, eventually):
    """The two others exchange meanwhile."""
    nodes, _ = start(shoal, 3, every=40)
    names = [f"peer-{number}" for number in range(3)]
    eventually(lambda: min(len(warm(shoal, name)) for name in names) >= 4, 120, "rounds")
    nodes[2].signal(signal.SIGSTOP)
    before = [len(shoal.rounds(name)) for name in names]
    eventually(lambda: len(shoal.rounds("peer-0")) >= before[0] + 12, 120, "rounds without it")
    meanwhile = [shoal.rounds(name)[count:] for name, count in zip(names, before, strict=True)]
    nodes[2].signal(signal.SIGCONT)
    eventually(lambda: len(shoal.rounds("peer-2")) >= before[2] + 16, 120, "rounds since")
    shoal.interrupt(*reversed(nodes))
    since = shoal.rounds("peer-2")[before[2] :]
    # Until it is known that it sleeps, each waits for it in the rounds in which it is the middle.
    assert all(found(events) > 0 for events in meanwhile[:2])
    # The first may have been under way when it fell asleep; the term of a peer that is passed over
    # is eight rounds.
    assert first_met(since[2:]) <= 4
    assert found(since[2:]) >= 0.25


@pytest.mark.slow(reason="real nodes")
def test_second_node_of_one_key_is_refused(shoal, eventually):
    """It names the first one's place, and the first exchanges on."""
    (first, second), link = start(shoal, 2, every=10)
    eventually(lambda: shoal.rounds("peer-1"), 60, "an exchange")
    shutil.copy(shoal.home / "peer-1.key", shoal.home / "copied.key")
    twin = shoal.node("join", link, "copied", "--task", TASK)
    assert twin.wait() == 2
    said = twin.said().splitlines()[-1]
    done = len(shoal.rounds("peer-1"))
    eventually(lambda: len(shoal.rounds("peer-1")) >= done + 8, 60, "exchanges since")
    since = shoal.rounds("peer-1")[done:]
    shoal.interrupt(second, first)
    key = shoal.result("peer-1")["peer"]
    assert said.startswith(f"Error: Another node runs with this node's key, {key}, at /ip4/127")
    assert f"/p2p/{key}, so exchanges with both of them fail: stop one of the two" in said
    assert found(since) >= 0.75
