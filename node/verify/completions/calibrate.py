"""Calibration of a policy: honest claims, measured on this machine for each pair of dtypes of prover and verifier."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from shoal.node.rl.environment import Env
from shoal.node.rl.policy import Policy
from shoal.node.verify.audit.errors import VerifyError
from shoal.node.verify.completions.examination import ACTIVATIONS, SAMPLING, examine, write
from shoal.node.verify.completions.material import DTYPES, Agreed, Coordinates, Dtype, seed_of
from shoal.verification.calibration.calibration import FEWEST, RATE, Calibration, CalibrationError, Pair
from shoal.verification.calibration.file import load_calibration, save_calibration
from shoal.verification.fingerprints import Evidence

QUESTIONS = 2**61  # the seed of the questions
Progress = Callable[[int, int], None]
"""(claims done, of how many)"""


def self_calibrate(
    policy: Policy, env: Env, agreed: Agreed, *, policy_name: str, claims: int, dtypes: Sequence[Dtype] = ("float32",),
    progress: Progress = lambda done, of: None, across: bool = True,
) -> Calibration:  # fmt: skip
    """Calibrate with ``claims`` honest claims of ``policy`` for each pair of ``dtypes``, or each of them with itself if not
    ``across``; the policy does not change.

    Raises VerifyError for fewer than 20 claims, or if the policy computes nonsense in one of the dtypes.
    """
    if claims < FEWEST:
        raise VerifyError(f"A calibration needs at least {FEWEST} claims, not {claims}: ask for more.")
    sides = {dtype: _cast(policy, dtype) for dtype in dtypes}
    evidence: dict[Pair, list[Evidence]] = {}
    for number, prover in enumerate(sides):
        for claim in range(claims):
            progress(number * claims + claim, len(sides) * claims)
            at = Coordinates.of(env, QUESTIONS, claim)
            prompt, seed = env.made.question(at.seed, at.index).prompt, seed_of("calibration", claim, prover, 0, at.hash)
            try:
                group = write(sides[prover], prompt, agreed, seed)
                proof, rows = ACTIVATIONS.make(group.states), [one.tokens for one in group.completions]
                for verifier in sides if across else (prover,):
                    for name, found in examine(sides[verifier], prompt, rows, proof, agreed, seed).items():
                        evidence.setdefault(Pair(name, policy_name, prover, verifier), []).append(found)
            except ValueError as error:
                raise VerifyError(f"The policy cannot be calibrated in {prover} ({error}): leave that dtype out.") from error
    progress(len(sides) * claims, len(sides) * claims)
    made = Calibration()
    for pair, found_of in evidence.items():
        made.add(pair, found_of)
    return made


def calibrate(
    policy: Policy, env: Env, agreed: Agreed, out: Path, *, policy_name: str, claims: int, dtypes: Sequence[Dtype] = ("float32",),
    rate: float = RATE, progress: Progress = lambda done, of: None,
) -> str:  # fmt: skip
    """Write ``self_calibrate`` to the file ``out``. Returns a warning if there are too few claims for ``rate``, or an empty text.

    Raises VerifyError as that, or if the file cannot be written; and ValueError for a rate out of range.
    """
    made = self_calibrate(policy, env, agreed, policy_name=policy_name, claims=claims, dtypes=dtypes, progress=progress)
    warning = next(iter(made.pairs.values())).warning(rate)
    try:
        save_calibration(made, out)
    except OSError as error:
        raise VerifyError(f"Cannot write {str(out)!r} ({error.strerror}): choose another file or its permissions.") from error
    return warning[:1].upper() + warning[1:]


def read_calibration(path: Path, policy_name: str, provers: Collection[str]) -> Calibration:
    """Read a file of ``calibrate``, for checking claims of that policy, each in its own dtype (`own_dtypes`) or in float32.

    Raises VerifyError if it cannot be read, or misses one of ``provers``' dtypes: abstaining costs reputation.
    """
    try:
        found = load_calibration(path)
    except CalibrationError as error:
        raise VerifyError(f"The calibration {error}.") from None
    own = own_dtypes(found, policy_name, provers)
    wanted = {
        Pair(fingerprint.name, policy_name, prover, prover if prover in own else "float32"): fingerprint.features
        for prover in provers
        for fingerprint in (ACTIVATIONS, SAMPLING)
    }
    if any(pair in found.pairs and found.pairs[pair].features != features for pair, features in wanted.items()):
        raise VerifyError(
            f"The calibration '{path}' was made by a version of shoal that measured other things: make another with "
            "`shoal verify calibrate`, or leave node.calibration out."
        )
    if any(pair not in found.pairs for pair in wanted):
        raise VerifyError(
            f"The calibration '{path}' says nothing about {policy_name!r} in {' and '.join(provers)}: make another with "
            "`shoal verify calibrate`, or leave node.calibration out."
        )
    return found


def own_dtypes(known: Calibration, policy_name: str, provers: Collection[str]) -> tuple[str, ...]:
    """Return those of ``provers``' dtypes that ``known`` can judge in the same dtype."""
    names = ACTIVATIONS.name, SAMPLING.name
    return tuple(one for one in provers if all(Pair(name, policy_name, one, one) in known.pairs for name in names))


def _cast(policy: Policy, dtype: Dtype) -> Policy:
    own = copy.deepcopy(policy)
    own.module.to(DTYPES[dtype]).eval()
    return own
