"""Claims say in which dtype and by what they were computed, and are checked in that dtype, where small changes show."""

from statistics import fmean

import pytest
import torch

from shoal.node.verify.audit import VerifyError
from shoal.node.verify.completions import CompletionClaims, own_dtypes, read_calibration, self_calibrate
from shoal.node.verify.material import decode_material
from shoal.node.verify.start import make_terms
from shoal.verification.calibration import Calibration, save_calibration
from shoal.verification.consensus.participant import Slot
from tests.node.verify.board import ROUND_S, Board, Net, settings_of, task_of

BOTH = ("float32", "bfloat16")


def noisy(weight):
    return weight + 0.004 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))


def statistics(world, checker, policy=None):
    found = [world.check(world.proven(index, policy, dtype="bfloat16"), checker) for index in range(8)]
    assert {one.pair.prover for each in found for one in each.measured} == {"bfloat16"}
    assert all(one.kernel.startswith(f"torch {torch.__version__}, cpu") for each in found for one in each.measured)
    return [each.statistics["activations_statistic"] for each in found]


def test_noise_that_rounding_hides_from_float32_shows_in_the_provers_dtype(world):
    """A check in float32, or one that computes in the prover's dtype with weights that it has not rounded, sees no difference."""
    own, across = world.checker(own=BOTH), world.checker()
    changed = world.changed(noisy)
    assert fmean(statistics(world, own, changed)) > 1 + max(statistics(world, own))
    assert fmean(statistics(world, across, changed)) < max(statistics(world, across))


def test_claims_of_two_dtypes_are_checked_in_turn_and_do_not_round_each_others_weights(world):
    checker = world.checker(own=BOTH)
    snapshots = [world.snapshot, None, None, None]
    for number, (dtype, held) in enumerate(zip((*BOTH, *BOTH), snapshots, strict=True)):
        proven = world.proven(number, dtype=dtype)
        finding = checker.check(world.claim(proven), proven.material, held)
        assert finding.accepted, finding.reason
        assert {(one.pair.prover, one.pair.verifier) for one in finding.measured} <= {(dtype, dtype)}
        assert finding.measured
        assert finding.statistics["error of values (ulp)"] < (0.01 if dtype == "float32" else 0.3)


def test_a_claim_says_by_what_it_was_computed(world):
    capability = torch.backends.cpu.get_cpu_capability()
    assert decode_material(world.proven().material).kernel == f"torch {torch.__version__}, cpu {capability}"[:64]


def test_a_calibration_serves_in_the_provers_dtype_or_else_in_float32(world, tmp_path):
    def kept(*pairs):
        path = tmp_path / "calibration"
        chosen = {pair: honest for pair, honest in world.calibration.pairs.items() if (pair.prover, pair.verifier) in pairs}
        save_calibration(Calibration(chosen), path)
        found = read_calibration(path, "tiny", ["bfloat16"])
        return own_dtypes(found, "tiny", ["bfloat16"])

    assert kept(("bfloat16", "bfloat16")) == ("bfloat16",)
    assert kept(("bfloat16", "float32")) == ()
    assert kept(("bfloat16", "float32"), ("bfloat16", "bfloat16")) == ("bfloat16",)
    with pytest.raises(VerifyError, match="says nothing about 'tiny' in bfloat16"):
        kept(("float32", "float32"), ("float32", "bfloat16"))


def test_a_node_measures_each_dtype_with_itself_alone(world):
    options = {"policy_name": "tiny", "claims": 20, "dtypes": BOTH, "across": False}
    found = self_calibrate(world.policy, world.env, world.agreed, **options)
    assert {(pair.prover, pair.verifier) for pair in found.pairs} == {(one, one) for one in BOTH}


def test_a_node_whose_policy_computes_in_bfloat16_claims_in_it_and_another_checks_it_so(tmp_path):
    board, found, agreed = Board(), [], None
    for name in ("ann", "bob"):
        task = task_of()
        task.connect(None, name)
        task.policy.module.to(torch.bfloat16 if name == "ann" else torch.float32)
        settings = settings_of(tmp_path / name)
        agreed = agreed or make_terms(settings, task)
        kind = CompletionClaims(settings, agreed, task, Net(board, name), lambda: board.now)
        found.append((task, kind))
    (task, ann), (_, bob) = found
    assert agreed.dtype == "bfloat16"
    ann.claimer.offer([Slot(int(board.now // ROUND_S), 0, False)])
    assert ann.claimer.write(task.policy, 0, 0, task.env.made.question(0, 0)) is not None
    (made,) = ann.claimer.take()
    assert decode_material(made.material).dtype == "bfloat16"
    finding = bob.prepare(lambda line: None).check(made.claim, made.material, made.snapshot)
    assert finding.accepted, finding.reason
    assert {(one.pair.prover, one.pair.verifier) for one in finding.measured} == {("bfloat16", "bfloat16")}
