"""Simulated members that are killed and stopped for seconds, as in ``python -m bench.chaos``."""

import pytest

from bench.sim.links import parse_net
from bench.sim.plan import SimPlan
from bench.sim.world import World
from shoal.swarm.settings.outer import OuterSettings


@pytest.mark.ci
@pytest.mark.parametrize("seed", [2, 9])
def test_a_nap_holds_the_others_up_for_seconds_only(seed):
    """The fault: who slept for five seconds held all others up for the rest of the run, for each of
    them waited for it, or led alone, in other rounds than the next one. Members did .66 and .49 of
    their inner steps, and by rosters more than .95.
    """
    outer = OuterSettings(method="streaming", codec="sign+ef", every=16).resolved()
    plan = SimPlan(
        4, parse_net("lan"), outer, churn=1.0, naps=1.0, minutes=1.5, seed=seed, uneven=0.0
    )
    result = World(plan).run()
    assert result.counts.napped > 0
    assert result.counts.killed > 0
    assert result.kept > 0.95
    assert result.samples[-1].spread < 0.2
