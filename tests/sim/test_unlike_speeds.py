"""Three quick peers and one that is four times slower, in pairs: the quick ones meet each other in
all their rounds and wait for nobody, and the slow one meets somebody in nearly all of its own.
Below, a group of two.
"""

from functools import partial

import pytest

from shoal.swarm.exchange.pair import selector
from shoal.swarm.exchange.pair.held_calls import HeldCalls
from shoal.swarm.exchange.pair_rounds import PairRounds
from tests.sim.memory_stream import NOTHING
from tests.sim.peers import Setting
from tests.sim.run import simulate

SLOW = 3  # the number of the slow peer
TIMES_SLOWER = 4
WARM_S, TRAINED_S = 20.0, 70.0  # until all know each other, and in all
SETTING = Setting(
    "pair",
    4,
    calm=TRAINED_S,
    patience=0.0,
    wait=10.0,
    chunk_timeout=5.0,
    exchange_timeout=120.0,
    options={"fragments": 2},
)


def shares(seed):
    """Return the parts of their exchanges that found nobody, of the quick peers and of the slow
    one, and the part of the time that the quick ones stood still.
    """
    swarms = []

    def prepare(swarm):
        swarms.append(swarm)
        for peer in swarm.peers:
            peer.pace = TIMES_SLOWER if peer.number == SLOW else 1.0
        over = partial(setattr, swarm, "over", True)
        swarm.network.loop.call_at(TRAINED_S, over, context=NOTHING)

    report = simulate(seed, setting=SETTING, faults=[], prepare=prepare)
    assert report.failure is None
    quick, slow = [], []
    for (number, _), one in swarms[0].contributions.items():
        # What the others will not be there for does not count.
        if WARM_S < one.begun < TRAINED_S - 2 * TIMES_SLOWER:
            (slow if number == SLOW else quick).append(one)
    stood_still = sum(max(one.ended - one.needed, 0.0) for one in quick if one.needed)
    of_time = stood_still / (SLOW * (TRAINED_S - WARM_S))
    return *(sum(one.mean is None for one in each) / len(each) for each in (quick, slow)), of_time


def test_quick_peers_do_without_a_slow_one():
    quick, slow, stood_still = shares(0)
    assert quick <= 0.02
    assert slow <= 0.15
    assert stood_still <= 0.02


@pytest.mark.slow(reason="three simulations of a second each")
@pytest.mark.parametrize(
    ("owner", "name", "mutant", "whose"),
    [
        (selector, "GAP_TIMES", float("inf"), "quick"),  # all count on the slow one
        (HeldCalls, "slower", lambda self, pairing: None, "slow"),  # only its pair takes a call
        (PairRounds, "next_of", lambda *call: None, "slow"),  # it is sent where all have been
    ],
    ids=["counted", "alone", "behind"],
)
def test_without_a_rule_many_find_nobody(monkeypatch, owner, name, mutant, whose):
    monkeypatch.setattr(owner, name, mutant)
    quick, slow, _ = shares(0)
    assert (quick if whose == "quick" else slow) > 0.2


GROUP_S = 200.0
GROUP = Setting(
    "group",
    2,
    calm=GROUP_S,
    patience=0.0,
    wait=3.0,
    options={"fragments": 2, "overlap": True},
)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_quick_leader_does_not_leave_itself_out(seeds, seed):
    """Fault: it waited for a slow member, noted against itself that its leader held it, and soon
    saw nobody that could lead: 7 means in place of 26.
    """
    swarms = []

    def prepare(swarm):
        swarms.append(swarm)
        for peer, pace in zip(swarm.peers, (2.0, 6.0), strict=True):
            peer.pace = pace
        swarm.network.loop.call_at(GROUP_S, setattr, swarm, "over", True, context=NOTHING)

    assert simulate(seed, setting=GROUP, faults=[], prepare=prepare).failure is None
    of_slow = [one for (who, _), one in swarms[0].contributions.items() if who == 1]
    assert sum(one.mean is not None for one in of_slow) >= 0.4 * len(of_slow)
