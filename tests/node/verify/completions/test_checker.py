"""Claims of the small policy: honest ones pass, and whatever a prover may try is refused with its
own sentence.
"""

import copy
import dataclasses

import pytest
import torch

from shoal.node.rl.strings import Strings
from shoal.node.rl.tiny import END, Tiny, Warm
from shoal.node.verify.errors import NotCalibrated, NotCheckable, VerifyError
from shoal.node.verify.finding import MAX_EVIDENCE_BYTES, Finding
from shoal.node.verify.group import ACTIVATIONS, read
from shoal.node.verify.material import Agreed, decode_material, seed_of
from shoal.node.verify.proven_group import make_claim, policy_label
from shoal.node.verify.snapshot import digest, snapshot
from shoal.verification.calibration import Calibration
from tests.node.verify.completions.attacks import restated, rounded
from tests.support.claims import PEER, ROUND, RUN, SLOT

SIDES = [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]


def refused(world, claim, material, checker=None, snapshot=None):
    finding = (checker or world.checker()).check(claim, material, snapshot or world.snapshot)
    assert not finding.accepted
    assert len(finding.evidence) <= MAX_EVIDENCE_BYTES
    return finding.reason


@pytest.mark.parametrize("sides", SIDES, ids="->".join)
def test_honest_claims_pass(world, sides):
    prover, verifier = sides
    checker = world.checker(own=(verifier,))
    for index in range(12):
        finding = world.check(world.proven(index, dtype=prover), checker)
        assert finding.accepted, finding.reason
        assert finding.statistics["tokens"] > 0
        assert finding.seconds > 0


@pytest.fixture(scope="module")
def calibrated_in_float16(world):
    """The world whose provers compute in float16 too."""
    from shoal.node.verify.calibrate import self_calibrate

    made = self_calibrate(
        world.policy,
        world.env,
        world.agreed,
        policy_name="tiny",
        claims=30,
        dtypes=("float16", "float32"),
    )
    return dataclasses.replace(world, calibration=made)


@pytest.mark.ci
@pytest.mark.parametrize("verifier", ["float32", "float16"])
def test_float16_too(world, calibrated_in_float16, verifier):
    other = calibrated_in_float16
    checker = other.checker(own=(verifier,))
    assert all(
        other.check(other.proven(index, dtype="float16"), checker).accepted for index in range(6)
    )
    int4 = world.changed(rounded(4))
    assert not any(
        other.check(other.proven(index, int4, dtype="float16"), checker).accepted
        for index in range(6)
    )


class CoarseTiny(Tiny):
    """A policy that computes in bfloat16 of its own accord, on weights of float32."""

    def generate(self, *args, **options):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().generate(*args, **options)


def test_a_claim_is_honest_under_autocast_of_the_node(world):
    """Training may run in bfloat16: what is claimed is computed, and checked, in the dtype of the
    weights all the same.
    """
    checker = world.checker(allowed=("float32",))
    for index in range(4):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            proven = world.proven(index, allowed=("float32",))
        assert decode_material(proven.material).dtype == "float32"
        assert world.check(proven, checker).accepted
        with torch.autocast("cpu", dtype=torch.bfloat16):
            finding = world.check(world.proven(index), checker)
        assert finding.accepted, finding.reason
        assert finding.statistics["error of values (ulp)"] < 0.5


def test_bfloat16_policy_says_so_or_claims_nothing(world):
    """A policy that computes in bfloat16 says so or does not claim."""
    coarse = CoarseTiny(Strings(), seed=8, warm=Warm(steps=0))
    coarse.module.load_state_dict(world.policy.module.state_dict())
    proven = world.proven(0, coarse)
    assert decode_material(proven.material).dtype == "bfloat16"
    assert world.check(proven).accepted
    with pytest.raises(
        VerifyError,
        match=r"^The policy computes in bfloat16, where claims of completions are in float32: give "
        r"it",
    ):
        world.proven(0, coarse, allowed=("float32",))


def test_cached_text_equals_a_prefill(world):
    """What was written with a cache is what a prefill gives."""
    proven = world.proven()
    rows = [one.tokens for one in proven.completions]
    states, margins = read(
        world.policy, world.env.made.question(99, 0).prompt, rows, world.agreed, proven.seed
    )
    assert float(margins.abs().max()) < 1e-4
    evidence = ACTIVATIONS.compare(decode_material(proven.material).proof, states)
    assert max(evidence.means()) < 0.5


@pytest.mark.thinned(4)
@pytest.mark.parametrize("sides", SIDES, ids="->".join)
@pytest.mark.parametrize("cheat", ["another model", "int4", "adapter merged"])
def test_other_weights_are_refused(world, sides, cheat):
    policy = {
        "another model": lambda: Tiny(Strings(), seed=2, warm=Warm(steps=40, batch=32)),
        "int4": lambda: world.changed(rounded(4)),
        # What merging an adapter of rank 1 does: a small change of low rank.
        "adapter merged": lambda: world.changed(
            lambda w: w + 0.3 * w.std() * torch.outer(torch.ones(w.shape[0]), w[0].sign())
        ),
    }[cheat]()
    prover, verifier = sides
    checker = world.checker(own=(verifier,))
    for index in range(6):
        finding = world.check(world.proven(index, policy, dtype=prover), checker)
        assert not finding.accepted
        assert "does not compute these activations (" in finding.reason


def test_a_swarm_may_allow_float32_alone(world):
    """Where a side is bfloat16, int8 passes: rounding is as large."""
    int8 = world.changed(rounded(8))
    disguised = world.check(
        world.proven(0, int8, dtype="bfloat16"), world.checker(allowed=("float32",))
    )
    assert (
        disguised.reason
        == "The completions are claimed to be computed in bfloat16, which the swarm does not allow."
    )


def test_planted_and_foreign_prompts_are_refused(world):
    """A planted claim another prompt and one with a prefix are refused."""
    checker = world.checker()
    for index in range(8):
        prompt = world.env.made.question(99, index).prompt
        for asked in (world.env.made.question(98, index).prompt, f"x {prompt}"):
            finding = world.check(world.proven(index, planted_prompt=asked), checker)
            assert not finding.accepted
            assert "activations" in finding.reason


def test_cheap_text_fails_the_draw(world):
    """Cheap text that the right policy has read is refused by how it was drawn."""
    cheap, checker = Tiny(Strings(), seed=2, warm=Warm(steps=40, batch=32)), world.checker()
    for index in range(8):
        proven = world.proven(index, cheap)
        rows = [one.tokens for one in proven.completions]
        states, _ = read(
            world.policy, world.env.made.question(99, index).prompt, rows, world.agreed, proven.seed
        )
        reason = refused(world, *restated(world, proven, proof=ACTIVATIONS.make(states)), checker)
        assert reason.startswith("The claimed policy would not have drawn these tokens (")


def test_a_replay_is_refused(world):
    old = world.proven()
    new = {
        "run": RUN,
        "round": ROUND + 1,
        "peer": PEER,
        "slot": SLOT,
        "model": digest(world.snapshot),
    }
    reason = refused(world, make_claim(old, **new), old.material)
    assert (
        reason
        == "The seed is not the one that this peer had to use for this round, slot and question."
    )
    for other in ({"slot": SLOT + 1}, {"peer": "another"}, {"run": "x"}):
        assert (
            refused(world, make_claim(old, **{**new, "round": ROUND, **other}), old.material)
            == reason
        )
    # With the seed of the new round and the old text, the draw does not fit.
    at = world.question(0)
    seeded = dataclasses.replace(old, seed=seed_of(RUN, ROUND + 1, PEER, SLOT, at.hash))
    assert "would not have drawn" in refused(world, make_claim(seeded, **new), old.material)


def test_truncated_lengthened_and_mislabelled_completions_are_refused(world):
    proven = world.proven()
    rows, finish = (
        decode_material(proven.material).rows(),
        list(decode_material(proven.material).finish),
    )
    place = next(
        number for number, row in enumerate(rows) if finish[number] == "stop" and len(row) > 2
    )

    def said(row, ended):
        new, ends = list(rows), list(finish)
        new[place], ends[place] = row, ended
        return refused(world, *restated(world, proven, new, ends))

    where = f"Completion {place + 1} of 8"
    cut = rows[place][:-1]
    assert (
        said(cut, "stop")
        == f"{where} is truncated: it stops after {len(cut)} of 12 tokens without an end."
    )
    assert said(cut, "length").endswith("without an end.")
    assert said((*rows[place], 5, END), "stop") == f"{where} goes on after its end."
    assert said(rows[place], "length") == f"{where} says that it ended otherwise than it did."
    assert said((5,) * 13, "length") == f"{where} has 13 tokens where at most 12 are agreed."
    assert said((97, END), "stop") == f"{where} has a token that the policy does not know."
    assert said((-1, END), "stop") == f"{where} has a token that the policy does not know."
    assert (
        refused(world, *restated(world, proven, rows[:7], finish[:7]))
        == "The group has 7 completions where 8 are agreed."
    )


def test_hashes_bind(world):
    proven, other = world.proven(0), world.proven(1)
    claim = world.claim(proven)
    assert (
        refused(world, claim, other.material) == "The material is not the one that the claim names."
    )
    assert refused(
        world, claim.model_copy(update={"output": bytes(32)}), proven.material
    ).startswith("The tokens are not those")
    assert refused(world, claim.model_copy(update={"prompt": bytes(32)}), proven.material).endswith(
        "question than the claim."
    )
    assert "other settings" in refused(
        world, claim.model_copy(update={"sampling": Agreed(0.5, 12, 8).hash}), proven.material
    )
    assert refused(world, claim, proven.material, snapshot=b"x").startswith(
        "The snapshot is not the one"
    )
    assert "another environment" in refused_elsewhere(world, proven)
    said = refused(world, *restated(world, proven, policy="hf:other"))
    assert said == "The claim is of the policy 'hf:other' where the swarm agreed on 'tiny'."
    junk = claim.model_copy(update={"fingerprint": digest(b"junk")})
    assert "refused" in refused(world, junk, b"junk")


def refused_elsewhere(world, proven):
    from shoal.node.rl.environment import Env, canonical

    other = dataclasses.replace(
        world, env=Env("strings", canonical({"letters": 3}), Strings(letters=3))
    )
    return refused(other, world.claim(proven), proven.material)


@pytest.mark.parametrize(
    ("forged", "said"),
    [
        (lambda proof: bytes(len(proof)), "The proof is empty: all of its bytes are zero."),
        (
            lambda proof: bytes(len(proof) - 1) + b"\1",
            "the proof has a window whose modulus is out of range",
        ),
        (lambda proof: proof[:-2], "The proof has "),
        (lambda proof: proof + bytes(258), "The proof has "),
        (lambda proof: b"", "The proof has 0 bytes, but one of"),
        (
            lambda proof: proof[:2] + b"\xff\xff" + proof[4:],
            "the proof has a coefficient that is out of range",
        ),
        # A polynomial that is 0x7fc0, not a number, everywhere.
        (
            lambda proof: proof[:2] + b"\x7f\xc0" + bytes(len(proof) - 4),
            "The claimed policy does not compute these activations (",
        ),
    ],
    ids=["null", "zeros", "short", "long", "none", "range", "nan"],
)
def test_forged_proofs_are_refused(world, forged, said):
    proven = next(p for p in map(world.proven, range(50)) if p.tokens <= 32)  # one window
    reason = refused(
        world, *restated(world, proven, proof=forged(decode_material(proven.material).proof))
    )
    assert said in reason


def test_the_proof_of_another_output_is_refused(world):
    proven = world.proven(0)
    other = next(p for p in map(world.proven, range(1, 200)) if p.tokens == proven.tokens)
    reason = refused(world, *restated(world, proven, proof=decode_material(other.material).proof))
    assert "does not compute these activations" in reason


def test_a_snapshot_that_cannot_be_used_is_refused(world):
    proven = world.proven()

    def said(data):
        claim, material = restated(world, proven, snapshot=len(data))
        return refused(
            world, claim.model_copy(update={"model": digest(data)}), material, snapshot=data
        )

    assert "is no safetensors file" in said(
        b"\xff" * 8 + world.snapshot[8:]
    )  # a header of 2^64 bytes
    assert "bytes where at most" in said(world.snapshot + bytes(100_000))
    assert said(snapshot(Tiny(Strings(), seed=2, layers=1, warm=Warm(steps=0)))).startswith(
        "The snapshot is of another policy"
    )
    huge = world.changed(lambda weight: weight * 1e30)
    assert said(snapshot(huge)).startswith("The claimed policy computes nonsense for these tokens")
    claim = world.claim(proven)
    assert "where the material says" in refused(world, *_with_size(world, proven, claim))


def _with_size(world, proven, claim):
    _, material = restated(world, proven, snapshot=len(world.snapshot) + 1)
    return claim.model_copy(update={"fingerprint": digest(material)}), material


def test_undecidable_claim_is_an_error(world):
    """What cannot be told here is an error and no finding."""
    proven = world.proven()
    claim, checker = world.claim(proven), world.checker()
    with pytest.raises(NotCheckable, match="is not here"):
        checker.check(claim, proven.material, None)
    bare = dataclasses.replace(world, calibration=Calibration()).checker()
    coarse = world.proven(dtype="bfloat16")
    with pytest.raises(NotCalibrated, match="there is no calibration"):
        bare.check(world.claim(coarse), coarse.material, world.snapshot)


def test_snapshots_survive_a_refused_one(world):
    """Snapshots are kept for later claims and a refused one spoils nothing."""
    checker, proven = world.checker(), world.proven()
    claim = world.claim(proven)
    assert not checker.knows(claim.model)
    assert checker.check(claim, proven.material, world.snapshot).accepted
    bad = copy.deepcopy(world.policy)
    with torch.no_grad():
        bad.module.head.weight[0, 0] = 3e38
    other = snapshot(bad)
    refused(
        world, claim.model_copy(update={"model": digest(other)}), proven.material, checker, other
    )
    assert checker.knows(claim.model)
    assert checker.check(claim, proven.material, None).accepted


def test_failure_of_ones_own_environment_blames_no_author(world):
    """The fault: it became a vote against the claim."""

    class Picky(Strings):
        def question(self, seed, index):
            if index == 5:
                raise OSError("Too many open files")
            return super().question(seed, index)

    proven = world.proven(5)
    picky = dataclasses.replace(world, env=dataclasses.replace(world.env, made=Picky()))
    with pytest.raises(NotCheckable, match=r"environment failed .* \(OSError\)"):
        picky.check(proven)


def test_evidence_is_bounded_whatever_the_reason():
    long = Finding(False, "é" * 5000, {f"figure {number}": 1 / 3 for number in range(100)})
    assert len(long.evidence) <= MAX_EVIDENCE_BYTES
    assert b"accepted" in long.evidence


def test_policies_have_names_without_folders_and_habits():
    assert [
        policy_label(spec)
        for spec in ("tiny", "tiny:first", "hf:org/name", "hf:/a b/c d.gguf", "hf:x/")
    ] == [
        "tiny",
        "tiny",
        "hf:name",
        "hf:c_d.gguf",
        "hf:x",
    ]
