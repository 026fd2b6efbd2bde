"""What fingerprints tell apart: honest claims and eight ways of cheating, for each pair of dtypes of prover and verifier.

    python bench/verification.py --claims 50 --calibrate 100 --tokens 128 --json

A claim is a text of a tiny random GPT, drawn at temperature 1 with a KV cache, and its two proofs: of activations and of sampling.
Each pair is calibrated with honest claims; then fresh ones are tested. A claim is refused if either proof is. "honest" is the rate
of false alarms, with its 95 % interval; the other rows are rates of detection. A warning of the calibration is printed.

The costs are relative to generating one claim, the least of several runs: making a proof of activations, and verifying both proofs.
The model is so small that generating is mostly Python, and so is verifying.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if not __package__:  # run as a file: its folder comes first on the path, where this very file hides the package
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import _verification_tiny as tiny
from verification.calibration import Calibration, Pair
from verification.fingerprints import ActivationProof, Drawn, Evidence, SeededSampling, prefill_states
from verification.interval import rate_interval

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SIDES = (("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "bf16"), ("fp16", "fp32"))
ACTIVATIONS, SAMPLING = ActivationProof(), SeededSampling()
FRESH, CHEATING = 100_000, 200_000  # first seeds, apart from those of the calibration
Prove = Callable[[int], tuple[Tensor, Tensor]]
"""From a claim's seed to its tokens and states."""


def seed_of(claim: int) -> bytes:
    return b"claim %d" % claim


def examine(verifier: tiny.TinyGPT, claim: int, tokens: Tensor, proof: bytes) -> tuple[Evidence, Evidence]:
    states, logits = prefill_states(verifier, tiny.prompt(claim), tokens)
    drawn = Drawn(tokens, logits, seed_of(claim))
    return ACTIVATIONS.compare(proof, states), SAMPLING.compare(SAMPLING.make(drawn), drawn)


def evidence(prove: Prove, verifier: tiny.TinyGPT, claim: int) -> tuple[Evidence, Evidence]:
    tokens, states = prove(claim)
    return examine(verifier, claim, tokens, ACTIVATIONS.make(states))


def cheats(model: tiny.TinyGPT, length: int) -> dict[str, Prove]:
    """Ways to prove what ``model`` has not written."""

    def by(other: tiny.TinyGPT) -> Prove:
        return lambda claim: tiny.generate(other, tiny.prompt(claim), length, seed_of(claim))

    stranger = tiny.TinyGPT(seed=1).to(model.head.weight.dtype)

    def passed(claim: int) -> tuple[Tensor, Tensor]:
        tokens, _ = by(stranger)(claim)
        return tokens, prefill_states(model, tiny.prompt(claim), tokens)[0]

    return {
        "int8 weights": by(tiny.changed(model, tiny.rounded(8))),
        "int4 weights": by(tiny.changed(model, tiny.rounded(4))),
        "weights + 1 % noise": by(tiny.changed(model, tiny.noisy(0.01))),
        "weights + 0.1 % noise": by(tiny.changed(model, tiny.noisy(0.001))),
        "a layer dropped": by(tiny.without_layer(model, 1)),
        "another prompt": lambda claim: tiny.generate(model, tiny.prompt(claim + 1), length, seed_of(claim)),
        "another model": by(stranger),
        "its text, prefilled": passed,
    }


def measure(sides: tuple[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """Rates for one pair of dtypes."""
    model, verifier = (tiny.TinyGPT().to(DTYPES[side]) for side in sides)
    pairs = [Pair(kind.name, "tiny", *sides) for kind in (ACTIVATIONS, SAMPLING)]

    def honest(claim: int) -> tuple[Tensor, Tensor]:
        return tiny.generate(model, tiny.prompt(claim), options.tokens, seed_of(claim))

    calibration = Calibration()
    known = [evidence(honest, verifier, claim) for claim in range(options.calibrate)]
    for at, pair in enumerate(pairs):
        calibration.add(pair, [found[at] for found in known])

    def refused(prove: Prove, first: int) -> int:
        found = (evidence(prove, verifier, first + claim) for claim in range(options.claims))
        return sum(
            not all(calibration.judge(*one, options.rate).accepted for one in zip(pairs, both, strict=True)) for both in found
        )

    alarms = refused(honest, FRESH)
    detection = {name: refused(prove, CHEATING) / options.claims for name, prove in cheats(model, options.tokens).items()}
    return {
        "honest_false_positive_rate": alarms / options.claims,
        "interval": rate_interval(alarms, options.claims),
        "detection": detection,
        "warning": calibration.pairs[pairs[0]].warning(options.rate),
    }


def least_s(job: Callable[[], Any], times: int = 5) -> float:
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        job()
        found.append(time.perf_counter() - begin)
    return min(found)


def costs(length: int) -> dict[str, float]:
    model = tiny.TinyGPT()
    tokens, states = tiny.generate(model, tiny.prompt(0), length, seed_of(0))
    proof = ACTIVATIONS.make(states)
    generating = least_s(lambda: tiny.generate(model, tiny.prompt(0), length, seed_of(0)))
    return {
        "proof_bytes_per_token": len(proof) / length,
        "proof_cost": least_s(lambda: ACTIVATIONS.make(states)) / generating,
        "verify_cost": least_s(lambda: examine(model, 0, tokens, proof)) / generating,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--claims", type=int, default=50, help="fresh claims in each row")
    parser.add_argument("--calibrate", type=int, default=100, help="honest claims to calibrate with, at least 20")
    parser.add_argument("--tokens", type=int, default=128, help="of a claim, at most 240")
    parser.add_argument("--rate", type=float, default=1e-4, help="of false alarms, as stated to the test")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    for name, low, high in (("claims", 1, 50_000), ("calibrate", 20, 50_000), ("tokens", 1, 240), ("rate", 1e-9, 0.5)):
        if not low <= getattr(options, name) <= high:
            parser.error(f"--{name} must be from {low} to {high}, not {getattr(options, name)}")
    torch.set_num_threads(1)

    pairs = {}
    for sides in SIDES:
        row = pairs[" -> ".join(sides)] = measure(sides, options)
        low, high = row["interval"]
        print(f"{' -> '.join(sides)}: honest {row['honest_false_positive_rate']:.1%} ({low:.1%} to {high:.1%})", file=sys.stderr)
        for name, rate in row["detection"].items():
            print(f"    {name:<22} {rate:6.1%}", file=sys.stderr, flush=True)
    print(row["warning"], file=sys.stderr)
    spent = costs(options.tokens)
    print("  ".join(f"{name} {value:.3g}" for name, value in spent.items()), file=sys.stderr)
    if options.json:
        how = {name: getattr(options, name) for name in ("claims", "calibrate", "tokens", "rate")}
        machine = {"python": platform.python_version(), "torch": torch.__version__}
        print(json.dumps({"policy": "tiny", **how, **machine, **spent, "pairs": pairs}))


if __name__ == "__main__":
    main()
