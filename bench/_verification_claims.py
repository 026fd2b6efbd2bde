"""One dtype of provers: honest claims and cheats against a verifier of each dtype, as scores.

A claim's score is how far the worse of its two proofs (activations, sampling) is beyond its
threshold, in units of the honest tail: it is refused if that is above 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from bench._verification_world import CHEATS, DTYPES, World, Writer, honest, seed_of
from shoal.verification.calibration import Honest
from shoal.verification.fingerprints.activations import WINDOW, ActivationProof
from shoal.verification.fingerprints.fingerprint import Evidence
from shoal.verification.fingerprints.sampling import Drawn, SeededSampling, margins

ACTIVATIONS, SAMPLING = ActivationProof(), SeededSampling()
FRESH, CHEATING = 10_000_000, 20_000_000  # first claims, apart from those of the calibration
Both = tuple[Evidence, Evidence]


@dataclass(frozen=True)
class Plan:
    """How many claims, of how many tokens.

    ``rate`` is that of false alarms stated to each of the two tests.
    """

    claims: int
    honest: int
    calibrate: int
    tokens: int
    rate: float


@dataclass(frozen=True)
class Scores:
    """By verifier: of fresh honest claims, and of each cheat. ``warning`` is the calibration's."""

    honest: dict[str, list[float]]
    cheats: dict[str, dict[str, list[float]]]
    warning: str


def examined(
    world: World,
    write: Writer,
    verifiers: Sequence[nn.Module],
    claims: Sequence[int],
    temperature: float,
) -> list[list[Both]]:
    """What each of ``verifiers`` finds in each of ``claims``."""
    asked = world.prompts(claims)
    tokens, states = write(claims, temperature)
    # Whole windows of claims one after the other are a proof of them all, which is made and
    # compared in less time.
    together = tokens.shape[1] % WINDOW == 0
    proofs = (
        [ACTIVATIONS.make(states.flatten(0, 1))]
        if together
        else [ACTIVATIONS.make(one) for one in states]
    )
    found = []
    for verifier in verifiers:
        own, logits = world.read(verifier, asked, tokens)
        parts = [own.flatten(0, 1)] if together else list(own)
        told = [ACTIVATIONS.compare(proof, part) for proof, part in zip(proofs, parts, strict=True)]
        if together:
            told = _parted(told[0], len(claims))
        drawings = (
            Drawn(row, seen, seed_of(claim), temperature)
            for row, seen, claim in zip(tokens, logits, claims, strict=True)
        )
        found.append(
            [
                (one, SAMPLING.measured(margins(drawn)))
                for one, drawn in zip(told, drawings, strict=True)
            ]
        )
    return found


def _parted(all_of: Evidence, claims: int) -> list[Evidence]:
    if all_of.fault:
        return [all_of] * claims
    each = len(all_of.values) // claims
    starts = range(0, len(all_of.values), each)
    return [
        Evidence(all_of.features, all_of.values[at : at + each], all_of.sizes[at : at + each])
        for at in starts
    ]


def _rows(first: int, count: int, rows: int) -> Iterator[range]:
    for at in range(first, first + count, rows):
        yield range(at, min(at + rows, first + count))


def measure(
    world: World, prover: str, verifiers: Sequence[str], temperature: float, plan: Plan
) -> Scores:
    """Calibrate with honest claims, then score fresh ones and every cheat."""
    model = world.model(DTYPES[prover])
    checking = [world.model(DTYPES[name]) for name in verifiers]

    def all_found(write: Writer, first: int, count: int) -> list[list[Both]]:
        found: list[list[Both]] = [[] for _ in verifiers]
        for claims in _rows(first, count, world.rows):
            for kept, new in zip(
                found, examined(world, write, checking, claims, temperature), strict=True
            ):
                kept += new
        return found

    known = all_found(honest(world, model, plan.tokens), 0, plan.calibrate)
    expected = [[Honest.of([both[at] for both in of_one]) for at in (0, 1)] for of_one in known]
    thresholds = [[one.threshold(plan.rate) for one in pair] for pair in expected]

    def scores(write: Writer, first: int, count: int) -> dict[str, list[float]]:
        return {
            name: [max(map(_beyond, both, pair, limit)) for both in found]
            for name, found, pair, limit in zip(
                verifiers, all_found(write, first, count), expected, thresholds, strict=True
            )
        }

    fresh = scores(honest(world, model, plan.tokens), FRESH, plan.honest)
    cheating = {
        name: scores(cheat(world, model, plan.tokens), CHEATING, plan.claims)
        for name, cheat in CHEATS.items()
    }
    return Scores(fresh, cheating, expected[0][0].warning(plan.rate))


def _beyond(evidence: Evidence, expected: Honest, threshold: float) -> float:
    if evidence.fault:
        return float("inf")
    if not any(
        map(any, evidence.values)
    ):  # as `Calibration.judge` has it: where nothing differs, nothing is refused
        return -threshold
    return expected.statistic(evidence)[0] - threshold
