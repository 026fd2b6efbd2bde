"""Claims about training: honest ones stand on other machines, each cheat and malformed thing is refused in its own sentence."""

import hashlib
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load, save

from bench._training_cheats import LABEL, OTHER, SHARD, World, moved
from shoal.node.task import Shard
from shoal.node.training.trainer import Trainer
from shoal.node.verify.audit.errors import NotCalibrated, VerifyError
from shoal.node.verify.training.audit import TrainingAudit, assemble, change, prove
from shoal.node.verify.training.calibrate import OTHERS, half, honest_evidence, plain_kernels, stretches
from shoal.node.verify.training.checker import TrainingChecker
from shoal.node.verify.training.material import Stretch, TrainingMaterial, TrainingTerms, projection_seed
from shoal.node.verify.training.replica import MODEL, Replica
from shoal.optim import Alone
from shoal.swarm.manifest.outer import OuterSettings, TrainSettings
from shoal.swarm.wire.envelope import pack, unpack
from shoal.verification.calibration.calibration import Calibration, Pair
from shoal.verification.fingerprints import WeightProjection
from tests.blocking import blocking

PLACE = {"run": "run", "round": 3, "peer": "anna", "slot": 0}
CHEATS = (
    "4 of 5 steps", "1 of 5 steps", "another shard", "learning rate + 10 %", "1 % noise on the change", "10 % noise on the change",
    "another peer's change", "another peer's weights", "change + 5 %", "nothing",
)  # fmt: skip


@pytest.fixture(scope="module")
def world():
    torch.set_num_threads(1)
    return World(150, layers=1, width=16, context=16)


@pytest.fixture(scope="module")
def kept(world):
    return list(world.honest(many=5))


@pytest.fixture(scope="module")
def calibration(world):
    found = Calibration()
    for dtype, conditions in (("float32", (plain_kernels,)), ("bfloat16", (half,))):
        evidence = honest_evidence(world.honest(Shard(2, 4, 1), 20), world.replica, world.terms, conditions, nullcontext)
        found.add(Pair("weights", LABEL, dtype, "float32"), evidence)
    return found


@pytest.fixture
def checker(world, calibration):
    return TrainingChecker(world.replica, world.terms, calibration, label=LABEL)


def proven(world, kept, **changed):
    return prove(kept, world.terms, **{**PLACE, **changed})


def judge(checker, made, shard=SHARD):
    return checker.check(made.claim, made.material, made.snapshot, shard)


class TestHonest:
    def test_the_same_machine_finds_the_same_bits_and_needs_no_calibration(self, world, kept):
        bare = TrainingChecker(world.replica, world.terms, Calibration(), label=LABEL)
        for one in kept:
            found = judge(bare, proven(world, one))
            assert found.accepted
            assert found.reason == "The steps, done again, lead to the claimed weights (nothing differs)."
            assert found.statistics == {"turned": 0.0, "longer": 0.0, "statistic": 0.0, "threshold": 0.0}
            assert 0 < len(found.evidence) <= 512

    def test_other_threads_and_kernels_pass(self, world, kept, checker):
        for number, one in enumerate(kept[:3]):
            found = judge(checker, proven(world, world.done(one, OTHERS[-number])))
            assert found.accepted, found.reason

    def test_another_dtype_passes_where_it_is_declared_and_not_where_it_is_hidden(self, world, kept, checker):
        other = world.done(kept[2], half)
        assert judge(checker, proven(world, other, dtype="bfloat16")).accepted
        assert not judge(checker, proven(world, other)).accepted

    def test_without_a_calibration_there_is_no_vote(self, world, kept):
        bare = TrainingChecker(world.replica, world.terms, Calibration(), label=LABEL)
        with pytest.raises(NotCalibrated, match="calibrate with honest claims first"):
            judge(bare, proven(world, moved(kept[0], lambda step: 0.9 * step)))


@pytest.mark.parametrize("name", CHEATS)
def test_each_cheat_is_refused(world, kept, checker, name):
    cheat = world.cheats(world.honest(OTHER))[name]
    for one in kept[:3]:
        found = judge(checker, proven(world, cheat(one)))
        assert not found.accepted
        assert "do not lead to the claimed weights" in found.reason
        assert found.statistics["statistic"] > found.statistics["threshold"]


def test_a_planted_claim_is_refused_and_looks_like_any_other(world, kept, checker):
    honest, planted = (proven(world, kept[1], planted=planted) for planted in (False, True))
    assert not judge(checker, planted).accepted
    assert len(planted.material) == len(honest.material)
    assert len(planted.snapshot) == len(honest.snapshot)


def changed(made, claim=(), material=(), **material_fields):
    """``made`` with other fields, and with hashes that fit the new material."""
    data = unpack(made.material, TrainingMaterial).model_copy(update=material_fields) if material_fields else None
    material = pack(data) if data is not None else made.material
    fields = {**made.claim.model_dump(), "fingerprint": hashlib.sha256(material).digest(), **dict(claim)}
    return replace(made, claim=type(made.claim)(**fields), material=material)


def reseeded(world, made, **fields):
    """As `changed`, and the seed fits too."""
    claim = made.claim
    data = unpack(made.material, TrainingMaterial).model_copy(update=fields)
    stretch = data.stretch.hash
    place = (claim.run, claim.round, claim.peer, claim.slot)
    seed = projection_seed(place, claim.model, stretch, claim.sampling, claim.output)
    return changed(made, {"prompt": stretch, "seed": seed}, **fields)


class TestMalformed:
    """What a prover can write, each refused before any step is done again, in its own words."""

    def refused(self, checker, made, words, shard=SHARD):
        found = judge(checker, made, shard)
        assert not found.accepted
        assert words in found.reason
        assert found.reason.endswith(".")
        assert len(found.evidence) <= 512

    def test_material(self, world, kept, checker):
        made = proven(world, kept[0])
        self.refused(checker, replace(made, material=made.material + b"\0"), "not the one that was claimed")
        for bad in (b"", b"\xff" * 100, b"\xdd\xff\xff\xff\xff", made.material[:-1], bytes(200_000)):
            digest = hashlib.sha256(bad).digest()
            claim = type(made.claim)(**{**made.claim.model_dump(), "fingerprint": digest})
            self.refused(checker, replace(made, material=bad, claim=claim), "The material cannot be read")

    def test_terms_and_stretch(self, world, kept, checker):
        made = proven(world, kept[0])
        other = TrainingTerms("other", world.terms.train)
        self.refused(checker, prove(kept[0], other, **PLACE), "other terms")
        self.refused(checker, changed(made, {"tokens": 6}), "other terms")
        self.refused(checker, changed(made, steps=4), "other terms")
        self.refused(checker, changed(made, first=5), "about other steps")
        self.refused(checker, reseeded(world, made, first=3), "Steps 4 to 8 are no stretch")
        self.refused(checker, reseeded(world, made, first=150), "Steps 151 to 155 are no stretch")
        self.refused(checker, reseeded(world, made, index=1), "another shard than the peer's own")
        self.refused(checker, reseeded(world, made, index=4), "another shard than the peer's own", shard=None)
        self.refused(checker, proven(world, kept[0], dtype="float8"), "computed in float8")

    def test_the_seed_follows_from_the_claim(self, world, kept, checker):
        made = proven(world, kept[0])
        self.refused(checker, changed(made, {"seed": made.claim.seed ^ 1}), "seed is not the one")
        for field, value in (("round", 4), ("peer", "bert"), ("slot", 1), ("run", "other")):  # an old claim, or another's
            self.refused(checker, changed(made, {field: value}), "seed is not the one")

    def test_snapshot(self, world, kept, checker):
        made = proven(world, kept[1])
        for bad in (b"", made.snapshot[:-1], made.snapshot[:-1] + b"\x01"):
            self.refused(checker, replace(made, snapshot=bad), "The snapshot is not the one that was claimed")

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda state: state.pop("random"), "its 'random' differs"),
            (lambda state: state.update(extra=torch.zeros(1)), "its 'extra' differs"),
            (lambda state: state.update({"optimizer.0.exp_avg": torch.zeros(2)}), "'optimizer.0.exp_avg' differs"),
            (lambda state: state.update({"optimizer.0.exp_avg": state["optimizer.0.exp_avg"].half()}), "differs"),
            (lambda state: state["optimizer.1.exp_avg_sq"].fill_(torch.nan), "not finite"),
            (lambda state: state["after.head.weight"][0].fill_(torch.inf), "not finite"),
        ],
    )
    def test_what_a_snapshot_holds(self, world, kept, checker, change, words):
        state = load(proven(world, kept[1]).snapshot)
        change(state)
        self.refused(checker, self.with_snapshot(world, kept[1], save(state)), words)

    def with_snapshot(self, world, kept, snapshot):
        """A claim whose hashes fit ``snapshot``, whatever that is."""
        made = proven(world, kept)
        model = hashlib.sha256(snapshot).digest()
        place = (made.claim.run, made.claim.round, made.claim.peer, made.claim.slot)
        seed = projection_seed(place, model, made.claim.prompt, made.claim.sampling, made.claim.output)
        return replace(changed(made, {"model": model, "seed": seed}, snapshot=max(1, len(snapshot))), snapshot=snapshot)

    def test_a_snapshot_that_is_none_or_too_large(self, world, kept, checker):
        huge = (2**40).to_bytes(8, "little") + b"{}"
        for bad, words in ((b"x", "cannot be read"), (huge, "cannot be read"), (bytes(10**6), "at most")):
            self.refused(checker, self.with_snapshot(world, kept[1], bad), words)

    def test_other_weights_than_were_claimed(self, world, kept, checker):
        state = load(proven(world, kept[1]).snapshot)
        state[MODEL + "norm.weight"] += 1
        self.refused(checker, self.with_snapshot(world, kept[1], save(state)), "weights are not the ones that were claimed")

    def test_nothing_done_at_all(self, world, kept, checker):
        idle = replace(kept[1], after=tuple(kept[1].state[MODEL + name].clone() for name in kept[1].names))
        with pytest.raises(VerifyError, match="Nothing can be claimed of these training steps"):
            proven(world, idle)
        forged = assemble(idle, world.terms, lambda seed: bytes(1028), **PLACE, dtype="float32")
        self.refused(checker, forged, "The steps are claimed to lead nowhere")

    def test_the_projection_of_the_right_steps_with_other_weights(self, world, kept, checker):
        """Trains rightly, shows that projection, and goes on from other weights."""

        def right(seed):
            return WeightProjection(seed).make(change(kept[1].names, kept[1].state, kept[1].after))

        poisoned = moved(kept[1], lambda step: -step)
        forged = assemble(poisoned, world.terms, right, **PLACE, dtype="float32")
        self.refused(checker, forged, "The projection is not that of the claimed weights")
        for bad in (b"", bytes(1028), b"\xff" * 1028, bytes(5000)):
            forged = assemble(kept[1], world.terms, lambda seed, bad=bad: bad, **PLACE, dtype="float32")
            self.refused(checker, forged, "The projection is not that of the claimed weights")

    def test_state_that_makes_nonsense_when_done_again(self, world, kept, checker):
        wild = {**kept[1].state, "optimizer.0.exp_avg": torch.full_like(kept[1].state["optimizer.0.exp_avg"], 3e38)}
        found = judge(checker, proven(world, replace(kept[1], state=wild)))
        assert not found.accepted

    def test_the_same_steps_are_claimed_once(self, world, kept, checker):
        first, again = proven(world, kept[0]), proven(world, kept[0], round=9)
        for claim in (again.claim, first.claim):
            checker.heard(claim)
        assert judge(checker, first).accepted
        self.refused(checker, again, "claimed by this peer before")
        assert judge(checker, proven(world, kept[0], peer="bert", round=10)).accepted  # another peer's are its own


class TestKeeping:
    def test_consecutive_stretches_are_a_chain(self, world, kept):
        claims = [proven(world, one) for one in kept]
        for one, two in pairwise(claims):
            assert unpack(two.material, TrainingMaterial).before == one.claim.output

    def test_no_stretch_goes_over_an_exchange(self, world):
        outer = blocking(method="noloco", every=12)
        kept = list(stretches(world.task(), world.terms, SHARD, outer))
        firsts = [one.stretch.first for one in kept]
        assert firsts[:5] == [0, 5, 15, 25, 30]
        bare = TrainingChecker(world.replica, world.terms, Calibration(), label=LABEL)
        assert all(judge(bare, proven(world, one)).accepted for one in kept[-3:])

    def test_rounds_without_room_are_said(self, world):
        for every in (1, 5):
            with pytest.raises(VerifyError, match="leave no room to audit 5 of them"):
                next(stretches(world.task(), world.terms, SHARD, blocking(method="local", every=every)))
        with pytest.raises(VerifyError, match=r"Rounds of 12 steps .*have fewer fragments"):
            next(stretches(world.task(), world.terms, SHARD, OuterSettings(method="noloco", every=12, fragments=4, lag=1)))

    def test_keeping_changes_no_bit_and_nothing_is_kept_unasked(self, world):
        ends = []
        for asked in (False, True):
            trainer = Trainer(world.task(), blocking(method="noloco", every=12), TrainSettings(steps=30, seed=1))
            trainer.connect(Alone(), "run", SHARD)
            audit = TrainingAudit(trainer, world.terms, since=7)
            for _ in range(30):
                if asked:
                    audit.request()
                trainer.step()
                audit.after_step()
            kept = audit.take()
            assert (kept is not None) == asked
            if kept is not None:
                assert kept.stretch == Stretch(SHARD, 25, 5)
                assert audit.broken == 1
                assert audit.take() is None
            ends.append([value.clone() for value in trainer.model.state_dict().values()])
        assert all(torch.equal(one, two) for one, two in zip(*ends, strict=True))

    def test_terms_out_of_range(self):
        for wrong in ({"steps": 0}, {"dims": 100}, {"dtypes": ()}):
            with pytest.raises(ValueError, match="a stretch has"):
                TrainingTerms("text", TrainSettings(), **wrong)


def test_a_replica_disturbs_nothing(world):
    torch.manual_seed(5)
    known = torch.get_rng_state()
    Replica(world.task(), world.terms.train)
    assert torch.equal(torch.get_rng_state(), known)
