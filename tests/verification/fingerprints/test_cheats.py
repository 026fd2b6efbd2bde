"""Claims of a tiny GPT end to end: honest ones of three dtypes pass, and each way of cheating is seen."""

import pytest
import torch

from bench import _verification_tiny as tiny
from shoal.verification.calibration import Calibration, Pair
from shoal.verification.fingerprints import ActivationProof, Drawn, SeededSampling, prefill_states

TOKENS, HONEST, FRESH = 64, 24, 8
ACTIVATIONS, SAMPLING = ActivationProof(), SeededSampling()
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SIDES = [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float32")]


def model(dtype):
    return tiny.TinyGPT().to(DTYPES[dtype])


def examined(prover, verifier, seed, asked=None):
    """The two kinds of evidence for a claim about ``tiny.prompt(seed)``, whatever the prover really did."""
    drawing = b"claim %d" % seed
    tokens, states = tiny.generate(prover, tiny.prompt(seed) if asked is None else asked, TOKENS, drawing)
    return judged(verifier, seed, tokens, states)


def judged(verifier, seed, tokens, states):
    own, logits = prefill_states(verifier, tiny.prompt(seed), tokens)
    drawn = Drawn(tokens, logits, b"claim %d" % seed)
    return ACTIVATIONS.compare(ACTIVATIONS.make(states), own), SAMPLING.compare(SAMPLING.make(drawn), drawn)


def pairs(prover, verifier):
    return [Pair(kind.name, "tiny", prover, verifier) for kind in (ACTIVATIONS, SAMPLING)]


@pytest.fixture(scope="module")
def calibration():
    made = Calibration()
    for prover, verifier in SIDES:
        evidence = [examined(model(prover), model(verifier), seed) for seed in range(HONEST)]
        for pair, claims in zip(pairs(prover, verifier), zip(*evidence, strict=True), strict=True):
            made.add(pair, claims)
    return made


def accepted(calibration, sides, evidence):
    return tuple(calibration.judge(pair, found).accepted for pair, found in zip(pairs(*sides), evidence, strict=True))


@pytest.mark.parametrize("sides", SIDES, ids="->".join)
def test_honest_claims_pass(calibration, sides):
    prover, verifier = map(model, sides)
    for seed in range(100, 100 + FRESH):
        assert accepted(calibration, sides, examined(prover, verifier, seed)) == (True, True)


CHEATS = {
    "int4": lambda honest: tiny.changed(honest, tiny.rounded(4)),
    "a layer dropped": lambda honest: tiny.without_layer(honest, 1),
    "another model": lambda honest: tiny.TinyGPT(seed=1).to(honest.head.weight.dtype),
    "noise of 3 %": lambda honest: tiny.changed(honest, tiny.noisy(0.03)),
}


@pytest.mark.parametrize("cheat", CHEATS)
@pytest.mark.parametrize("sides", SIDES, ids="->".join)
def test_other_weights_are_seen(calibration, sides, cheat):
    prover, verifier = CHEATS[cheat](model(sides[0])), model(sides[1])
    assert not any(accepted(calibration, sides, examined(prover, verifier, seed))[0] for seed in range(200, 204))


@pytest.mark.parametrize("sides", [SIDES[0], SIDES[3]], ids="->".join)
@pytest.mark.parametrize("change", [tiny.rounded(8), tiny.noisy(0.01)], ids=["int8", "noise of 1 %"])
def test_slightly_other_weights_are_seen_where_rounding_is_finer(calibration, sides, change):
    """With bfloat16 on a side, 24 honest claims of 64 tokens are too few to tell them from rounding at 1 in 10,000."""
    prover, verifier = tiny.changed(model(sides[0]), change), model(sides[1])
    assert not any(accepted(calibration, sides, examined(prover, verifier, seed))[0] for seed in range(200, 204))


@pytest.mark.parametrize("sides", SIDES, ids="->".join)
def test_another_prompt_and_one_with_a_prefix_are_seen(calibration, sides):
    prover, verifier = map(model, sides)
    for seed in range(200, 204):
        for asked in (tiny.prompt(seed + 1), torch.cat((tiny.prompt(5, 2), tiny.prompt(seed)))):
            assert not accepted(calibration, sides, examined(prover, verifier, seed, asked))[0]


@pytest.mark.parametrize("sides", SIDES[:3], ids="->".join)
def test_cheap_text_that_the_right_model_has_read_is_seen_by_its_sampling_alone(calibration, sides):
    right, verifier = map(model, sides)
    for cheat in ("another model", "a layer dropped"):
        for seed in range(200, 204):
            tokens, _ = tiny.generate(CHEATS[cheat](right), tiny.prompt(seed), TOKENS, b"claim %d" % seed)
            states, _ = prefill_states(right, tiny.prompt(seed), tokens)
            assert accepted(calibration, sides, judged(verifier, seed, tokens, states)) == (True, False)


def test_truncated_and_replayed_work_is_seen(calibration):
    honest = model("float32")
    tokens, states = tiny.generate(honest, tiny.prompt(1), TOKENS, b"claim 1")
    own, _ = prefill_states(honest, tiny.prompt(1), tokens)
    assert "bytes" in ACTIVATIONS.compare(ACTIVATIONS.make(states[:32]), own).fault
    other, _ = prefill_states(honest, tiny.prompt(2), tokens)
    evidence = ACTIVATIONS.compare(ACTIVATIONS.make(states), other)
    assert not calibration.judge(pairs(*SIDES[0])[0], evidence).accepted


def test_the_reason_names_what_differs(calibration):
    evidence = examined(CHEATS["int4"](model("float32")), model("float32"), 300)[0]
    assert calibration.judge(pairs(*SIDES[0])[0], evidence).reason.startswith("error of values (ulp): ")
