"""Simulated peers of one group, or a pair, of which one is four times slower."""

import pytest

from bench.sim.links import parse_net
from bench.sim.peer import SimPeer
from bench.sim.plan import SimPlan
from bench.sim.world import World
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.training.step_rate import Rates

TIMES_SLOWER = 4
STEP_S = 0.02
"""So short that the slow one is there before a group goes on without it."""


@pytest.fixture
def said(monkeypatch):
    """Return the function that trains with so many peers, the last of which is slow, and returns
    the sentences of each about what it waits for.
    """
    make = SimPeer.__init__

    def make_slow(peer, world, number, *, newcomer):
        make(peer, world, number, newcomer=newcomer)
        if number == world.plan.peers - 1:
            peer.step_s *= TIMES_SLOWER
            peer.member.records.rates = Rates(1 / peer.step_s)

    def trained(peers, **settings):
        outer = OuterSettings(every=8, **settings).resolved()
        plan = SimPlan(
            peers, parse_net("lan"), outer, minutes=0.15, uneven=0.0, step_seconds=STEP_S
        )
        world = World(plan)
        world.run()
        return [[said for _, said in peer.member.lag_report.news()] for peer in world.live]

    monkeypatch.setattr(SimPeer, "__init__", make_slow)
    return trained


@pytest.mark.parametrize("method", ["streaming", "diloco"])
def test_quick_members_of_a_group_name_the_slow_one(said, method):
    *quick, slow = said(3, method=method)
    for (sentence,) in quick:
        assert sentence.startswith(
            "p2 is slow: an inner step takes it 80 ms and this node 20 ms, and all wait for the "
            "slowest in every round, so this node computes 2"
        )
    assert slow == []


def test_pair_names_no_slow_partner(said):
    """Pairs change from round to round, so waits of several are not one peer's."""
    assert said(2, method="noloco", lag=0) == [[], []]
