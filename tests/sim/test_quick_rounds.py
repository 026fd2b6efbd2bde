"""Two peers in one machine whose rounds take milliseconds: they begin apart, and know of each other
after many rounds, but cannot leapfrog each other for good.
"""

import pytest

from tests.sim import run
from tests.sim.network import Links
from tests.sim.peers import Setting
from tests.sim.run import simulate

WAIT_S = 1.0
QUICK = Setting("pair", 2, calm=1.0, patience=5.0, wait=WAIT_S, pace=(0.001, 0.003))
SLOW_NEWS = Links(latency=0.0005, jitter=0.005, bandwidth=1e8)
"""Bytes take milliseconds, and some records half a second."""


def rounds_of(lines, peer):
    """Return when each round of ``peer`` ended, and whether it had a partner, from the first that
    did not end at once: while it knows of nobody, all do.
    """
    begun, found = 0.0, []
    for line in lines:
        time, who, what = line.split(" ", 2)
        if who != peer or not what.startswith("round "):
            continue
        if what.endswith(" begins"):
            begun = float(time)
        elif found or float(time) > begun:
            found.append((float(time), not what.endswith("alone")))
    return found


@pytest.mark.parametrize("seed", range(12))
def test_quick_peers_that_count_far_apart_meet_and_stay_together(monkeypatch, seed):
    """Who is ahead waits in its round, and who is behind takes one round after another without a
    wait, so it comes there. Mutant: who is behind waits too, or jumps beyond the other.
    """
    monkeypatch.setattr(run, "Links", lambda *given: SLOW_NEWS)
    report = simulate(seed, setting=QUICK, faults=[], keep=True)
    assert report.failure is None
    both = [rounds_of(report.lines, peer) for peer in ("p0", "p1")]
    known = max(rounds[0][0] for rounds in both)  # by both of each other
    for rounds in both:
        met = [partner for _, partner in rounds]
        first = met.index(True)
        assert rounds[first][0] <= known + WAIT_S
        assert all(met[first:-1])  # in the last one the other may have left
