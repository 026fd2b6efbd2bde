"""A swarm falls into two parts, both go on, and when the network is whole they come together: real
exchanges, network in memory.
"""

import pytest

from tests.support.split_swarm import Swarm


@pytest.fixture
def swarm(network):
    made = []

    def make(*arguments):
        made.append(Swarm(network, *arguments))
        return made[-1]

    yield make
    for each in made:
        each.quiet()
        each.pool.shutdown()


LONG = [
    pytest.param(*case, marks=pytest.mark.slow(reason="many rounds of exchanges in real time"))
    for case in (("diloco", 3, 5), ("streaming", 2, 4), ("co2", 1, 4))
]


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("method", "first", "count"), [("diloco", 1, 4), ("diloco", 2, 4), ("co2", 2, 4), *LONG]
)
def test_equal_round_parts_reunite_with_equal_weights(swarm, method, first, count):
    """Two parts of a group in the same round end with equal weights."""
    whole = swarm(method, count)
    whole.train(3)
    assert whole.spread() == pytest.approx(0, abs=1e-6)
    whole.split(first)
    whole.train(4)
    assert whole.spread() > 1e-3
    before = max(node.flat().norm().item() for node in whole.nodes)
    whole.heal()
    whole.train(6)
    assert whole.spread() == pytest.approx(0, abs=1e-6)
    assert whole.monotone()
    assert max(node.flat().norm().item() for node in whole.nodes) < 3 * before


def test_the_larger_part_does_not_lose_what_it_learnt(swarm):
    whole = swarm("diloco", 4)
    whole.train(3)
    (smaller,), larger = whole.split(1)
    whole.train(4)
    whole.heal()
    whole.train(6)
    assert whole.spread() == pytest.approx(0, abs=1e-6)
    assert smaller.took_over == 1
    assert [node.took_over for node in larger] == [0, 0, 0]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("ahead", [0, 1])
def test_the_part_that_is_behind_comes_to_the_other(swarm, ahead):
    whole = swarm("diloco", 4, 1.5)  # those ahead wait for the others as long as for anybody
    whole.train(2)
    parts = whole.split(2)
    whole.train(3)
    whole.train(5, parts[ahead])
    assert parts[ahead][0].opt.round == parts[1 - ahead][0].opt.round + 5
    whole.heal()
    # How many rounds it takes depends on the threads: one that is late misses a round, and comes by
    # the next.
    assert any(whole.together_after_a_round() for _ in range(30))
    assert whole.monotone()


@pytest.mark.ci
@pytest.mark.parametrize("method", ["noloco", "overlapped"])
def test_pairs_mix_by_themselves(swarm, method):
    whole = swarm(method, 4)
    whole.train(4)
    usual = whole.spread()
    whole.split(2)
    whole.train(8)
    apart = whole.spread()
    whole.heal()
    whole.train(12)
    assert whole.spread() < max(0.5 * apart, 2 * usual)
    assert whole.monotone()
