"""Simulated peers of one group that train while they exchange, with rounds of sixteen seconds."""

import pytest

from bench.sim.links import parse_net
from bench.sim.peer import SimPeer
from bench.sim.plan import SimPlan
from bench.sim.world import World
from shoal.swarm.settings.outer import OuterSettings


@pytest.mark.parametrize("times_slower", [1.02, 1.15, 1.5])
def test_a_slow_member_takes_part_in_every_group(monkeypatch, times_slower):
    """The fault: a group went on three seconds after its second member had come, though training
    needed its mean ten seconds later. Of members of which one was 2 % slower all were there in
    half of the exchanges, and the slow one was alone in a quarter.
    """
    make, on_round, members = SimPeer.__init__, SimPeer._on_round, []

    def make_slow(peer, world, number, *, newcomer):
        make(peer, world, number, newcomer=newcomer)
        if number == world.plan.peers - 1:
            peer.step_s *= times_slower

    def count(peer, info):
        members.append(len(info.members))
        on_round(peer, info)

    monkeypatch.setattr(SimPeer, "__init__", make_slow)
    monkeypatch.setattr(SimPeer, "_on_round", count)
    outer = OuterSettings(method="streaming", codec="sign+ef", every=16).resolved()
    World(SimPlan(3, parse_net("lan"), outer, minutes=4.0, uneven=0.0, step_seconds=1.0)).run()
    assert len(members) > 120
    assert set(members[-72:]) == {3}  # two rounds of each fragment show how long they are
