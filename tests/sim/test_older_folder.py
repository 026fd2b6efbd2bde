"""A peer whose folder was restored from an older copy: its round and weights are of long ago, and
its key is the one that the others know (exo #2197).
"""

import pytest

from tests.sim.faults import Fault
from tests.sim.memory_stream import NOTHING
from tests.sim.peers import Setting
from tests.sim.run import simulate

VICTIM, PEERS = 2, 4
SAVED, TRAINED = 5.0, 60.0  # seconds: the copy is made; all leave
KILLED = {"pair": 900, "group": 1800}  # the event in which it is killed
AWAY = 6.0  # seconds until it is back
WITHIN = 6  # rounds after its return in which it exchanges again


def returned(kind, seed):
    """Return the rounds that a restored peer was behind, and of each of its rounds since whether it
    exchanged.
    """
    found = {}

    def prepare(swarm):
        loop, victim = swarm.network.loop, swarm.peers[VICTIM]

        def save():
            found["copy"] = victim.round, victim.weights

        def restore():
            found["behind"] = swarm.peers[0].round - found["copy"][0]
            found["since"] = loop.time()
            victim.round, victim.weights = found["copy"]
            victim.went_back += 1
            begin()

        begin, victim.begin = victim.begin, restore
        found["swarm"], found["victim"] = swarm, victim
        loop.call_at(SAVED, save, context=NOTHING)
        loop.call_at(TRAINED, setattr, swarm, "over", True, context=NOTHING)

    faults = [Fault(KILLED[kind], "kill", VICTIM, AWAY, 0.9)]
    setting = Setting(kind, PEERS, calm=TRAINED, patience=0.0)
    report = simulate(seed, setting=setting, faults=faults, prepare=prepare)
    assert report.failure is None
    own = [
        one
        for (number, _), one in found["swarm"].contributions.items()
        if number == VICTIM and one.begun > found["since"]
    ]
    return found["behind"], [one.mean is not None for one in own]


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["pair", "group"])
def test_a_peer_restored_from_an_older_copy_is_met_again(kind):
    behind, met = returned(kind, 0)
    assert behind > 10
    assert any(met[:WITHIN])
    assert sum(met) > len(met) / 2
