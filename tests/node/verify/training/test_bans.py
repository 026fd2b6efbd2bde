"""A swarm in one process that audits its training: who does not do its steps is banned, and nobody else."""

from bench import votes_simulation as simulation
from bench._training_cheats import LABEL, World, with_change_of
from bench._votes_peers import Peer
from bench.votes_simulation import Swarm
from shoal.node.task import Shard
from shoal.node.verify.training.audit import prove
from shoal.node.verify.training.calibrate import stretches
from shoal.node.verify.training.checker import TrainingChecker
from shoal.node.verify.training.material import TrainingTerms
from shoal.swarm.manifest.outer import TrainSettings
from shoal.verification.calibration.calibration import Calibration, Pair
from shoal.verification.consensus.voter import Checked
from shoal.verification.fingerprints import Evidence, WeightProjection

KINDS = {**{f"honest-{number}": "honest" for number in range(5)}, "liar-0": "liar", "liar-1": "liar"}
TERMS = TrainingTerms(LABEL, TrainSettings(steps=0, seed=1))
EQUAL = Evidence.single(WeightProjection.features, 0.0, 0.0)
CALIBRATED = Calibration()
CALIBRATED.add(Pair("weights", LABEL, "float32", "float32"), [EQUAL] * 20)


def test_who_does_fewer_steps_or_takes_anothers_is_banned(monkeypatch):
    world = World(150, layers=1, width=16, context=16, batch=2)
    handed_out, reasons = {}, {}

    def stretches_of(name):
        return stretches(world.replica.task, TERMS, Shard(sorted(KINDS).index(name), len(KINDS), 1))

    class Trainee(Peer):
        """Claims stretches of its training, on its own shard; the first liar does a step fewer, the second copies a peer."""

        def __init__(self, name, kind, swarm):
            super().__init__(name, kind, swarm)
            cheat = next(iter(world.cheats(iter(())).values()))
            own, first = stretches_of(name), stretches_of("honest-0")
            self.kept = {"liar-0": map(cheat, own), "liar-1": map(with_change_of, own, first)}.get(name, own)
            # All compute alike here, so honest weights are equal to the bit; others are judged by a calibration that has only that.
            self.checker = TrainingChecker(world.replica, TERMS, CALIBRATED, label=LABEL)

        def _claim(self, slot):
            place = {"run": "run", "round": slot.round, "peer": self.name, "slot": slot.slot}
            made = prove(next(self.kept), TERMS, **place, planted=slot.planted)
            handed_out[made.claim.fingerprint] = made
            self.participant.claim(made.claim)

        def check(self, claim):
            made = handed_out[claim.fingerprint]
            shard = Shard(sorted(KINDS).index(claim.peer), len(KINDS), 1)
            self.checker.heard(claim)
            found = self.checker.check(claim, made.material, made.snapshot, shard)
            reasons.setdefault(claim.peer, set()).add(found.accepted)
            return Checked("valid" if found.accepted else "invalid", found.evidence)

    monkeypatch.setattr(simulation, "Peer", Trainee)
    swarm = Swarm(KINDS, simulation.World(seed=2))
    swarm.run(16)
    table = swarm.peers[0].participant.table
    assert {name for name, standing in table.standings.items() if standing.until is not None} == {"liar-0", "liar-1"}
    assert reasons["liar-0"] == reasons["liar-1"] == {False}
    assert all(True in reasons[name] for name in KINDS if name.startswith("honest"))
    for ruling in table.rulings.values():
        assert ruling.outcome != "valid" or ruling.claim.peer.startswith("honest")
