"""Real nodes that average over everyone: all hold the same slow weights, also who came late or
missed rounds.
"""

import signal

import pytest
import torch

from shoal.node.checkpoint import store


def held(shoal, name):
    """The digest of the slow weights after each round in which somebody took part."""
    return {
        event["round"]: event["weights"] for event in shoal.rounds(name) if event["members"] > 1
    }


def together(shoal, names, after):
    """The rounds later than ``after`` in which all of ``names`` were, and ended with the same
    weights.
    """
    each = [held(shoal, name) for name in names]
    common = set.intersection(*map(set, each))
    return sorted(r for r in common if r > after and len({weights[r] for weights in each}) == 1)


def stop(*nodes):
    for node in nodes:
        node.signal(signal.SIGINT)
    assert {node.wait() for node in nodes} == {130}


OUTER = {
    "diloco": {"method": "diloco", "every": 20},
    "streaming": {"method": "streaming", "every": 40, "fragments": 2, "lag": 3},
    "co2": {"method": "co2", "every": 20},
    "sparse": {"method": "sparseloco", "every": 20},
}


@pytest.mark.slow(reason="real nodes, one of which joins late")
@pytest.mark.parametrize("outer", OUTER.values(), ids=OUTER.keys())
def test_who_comes_late_ends_with_the_weights_of_the_others(shoal, eventually, outer):
    table = shoal.toml(
        swarm={"name": "group", "start_when": 2},
        outer={**outer, "wait_s": 5.0},
        options={"context": 32},
    )
    first = shoal.node("up", table, "a")
    link = first.line()
    second = shoal.node("join", link, "b")
    eventually(lambda: len(together(shoal, ["a", "b"], -1)) >= 3, 60, "three rounds of two")
    third = shoal.node("join", link, "c")
    eventually(lambda: shoal.rounds("c"), 60, "a round of the third")
    began = shoal.rounds("c")[0]["round"]
    assert began >= 3
    eventually(
        lambda: len(together(shoal, ["a", "b", "c"], began)) >= 6,
        90,
        "six rounds of three with equal weights",
    )
    stop(third, second, first)


@pytest.mark.slow(reason="a node is stopped for several rounds of seconds")
@pytest.mark.parametrize(
    "outer", [pytest.param(OUTER[name], id=name) for name in ("diloco", "streaming")]
)
def test_who_slept_ends_with_the_weights_of_the_others(shoal, eventually, outer):
    table = shoal.toml(
        swarm={"name": "group", "start_when": 3},
        outer={**outer, "wait_s": 2.0},
        options={"context": 32},
    )
    first = shoal.node("up", table, "a")
    link = first.line()
    second, sleeper = shoal.node("join", link, "b"), shoal.node("join", link, "c")
    eventually(lambda: len(together(shoal, ["a", "b", "c"], -1)) >= 2, 90, "two rounds of three")
    sleeper.signal(signal.SIGSTOP)
    fell_asleep = max(held(shoal, "a"))
    eventually(
        lambda: len(together(shoal, ["a", "b"], fell_asleep + 2)) >= 2, 60, "the others' going on"
    )
    sleeper.signal(signal.SIGCONT)
    woke = max(held(shoal, "a"))
    eventually(
        lambda: len(together(shoal, ["a", "b", "c"], woke)) >= 3,
        90,
        "three rounds of three with equal weights",
    )
    stop(sleeper, second, first)


@pytest.mark.slow(reason="three real nodes")
def test_members_of_a_group_end_with_one_model(shoal, eventually):
    """The one that came late is in another round at its last step.

    Mutant: a swarm over everyone makes no last average.
    """
    table = shoal.toml(
        swarm={"name": "group", "start_when": 2},
        outer={**OUTER["streaming"], "wait_s": 5.0},
        options={"context": 32},
    )
    first = shoal.node("up", table, "a")
    link = first.line()
    second = shoal.node("join", link, "b")
    eventually(lambda: len(shoal.rounds("a", 2)) >= 3, 60, "three rounds of two")
    third = shoal.node("join", link, "c")
    eventually(lambda: shoal.rounds("c", 3), 60, "a round of three")
    shoal.start("end", link, "--identity", shoal.home / "a.key", "--json").json()
    assert {node.wait() for node in (first, second, third)} == {0}
    averages = [shoal.result(name)["last_average"] for name in "abc"]
    assert [average["members"] for average in averages] == [["a", "b", "c"]] * 3
    states = [store.load(shoal.home / name)[1]["trainer"]["optimizer"] for name in "abc"]
    for state in states[1:]:
        pairs = zip(states[0]["slow"], state["slow"], strict=True)
        assert all(torch.equal(first, other) for first, other in pairs)
