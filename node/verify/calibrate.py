"""Calibration of a policy: honest claims, measured on this machine for each pair of dtypes of
prover and verifier.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from shoal.node.config.device import use_threads
from shoal.node.rl.environment import Env
from shoal.node.rl.loading import load_env, load_policy
from shoal.node.rl.policy import Policy
from shoal.node.verify.errors import VerifyError
from shoal.node.verify.group import ACTIVATIONS, SAMPLING, examine, write
from shoal.node.verify.material import DTYPES, Agreed, Coordinates, Dtype, seed_of
from shoal.node.verify.proven_group import policy_label
from shoal.verification.calibration import FEWEST, Calibration, CalibrationError, Pair
from shoal.verification.calibration_file import load_calibration, save_calibration
from shoal.verification.fingerprints.fingerprint import Evidence, Feature

QUESTIONS_SEED = 2**61
"""Of the questions."""
Progress = Callable[[int, int], None]
"""(claims done, of how many)"""


def self_calibrate(
    policy: Policy,
    env: Env,
    agreed: Agreed,
    *,
    policy_name: str,
    claims: int,
    dtypes: Sequence[Dtype] = ("float32",),
    progress: Progress = lambda done, of: None,
    across: bool = True,
) -> Calibration:
    """Calibrate with ``claims`` honest claims of ``policy`` for each pair of ``dtypes``, or each of
    them with itself if not ``across``; the policy does not change.

    Raises VerifyError for fewer than 20 claims, or if the policy computes nonsense in one of the
    dtypes.
    """
    if claims < FEWEST:
        raise VerifyError(
            f"A calibration needs at least {FEWEST} claims, not {claims}: ask for more."
        )
    sides = {dtype: copy.deepcopy(policy) for dtype in dtypes}
    for dtype, own in sides.items():
        own.module.to(DTYPES[dtype]).eval()
    evidence: dict[Pair, list[Evidence]] = {}
    for number, prover in enumerate(sides):
        verifiers = sides if across else {prover: sides[prover]}
        for claim in range(claims):
            progress(number * claims + claim, len(sides) * claims)
            try:
                measured = _measured(
                    prover, sides[prover], verifiers, env, agreed, policy_name, claim
                )
            except ValueError as error:
                raise VerifyError(
                    f"The policy cannot be calibrated in {prover} ({error}): leave that dtype out."
                ) from error
            for pair, found in measured.items():
                evidence.setdefault(pair, []).append(found)
    progress(len(sides) * claims, len(sides) * claims)
    made = Calibration()
    for pair, found_of in evidence.items():
        made.add(pair, found_of)
    return made


def _measured(
    prover: Dtype,
    writer: Policy,
    verifiers: Mapping[Dtype, Policy],
    env: Env,
    agreed: Agreed,
    policy_name: str,
    claim: int,
) -> dict[Pair, Evidence]:
    """Write honest claim number ``claim``, and measure it with each verifier. Raises ValueError."""
    at = Coordinates.of(env, QUESTIONS_SEED, claim)
    prompt = env.made.question(at.seed, at.index).prompt
    seed = seed_of("calibration", claim, prover, 0, at.hash)
    group = write(writer, prompt, agreed, seed)
    proof = ACTIVATIONS.make(group.states)
    rows = [one.tokens for one in group.completions]
    measured: dict[Pair, Evidence] = {}
    for verifier, policy in verifiers.items():
        for name, found in examine(policy, prompt, rows, proof, agreed, seed).items():
            measured[Pair(name, policy_name, prover, verifier)] = found
    return measured


def read_calibration(path: Path, policy_name: str, provers: Collection[str]) -> Calibration:
    """Read a file of ``shoal verify calibrate``, to check claims of that policy by, each in its own
    dtype or in float32.

    Raises VerifyError if it cannot be read, or misses one of ``provers``' dtypes: abstaining costs
    reputation.
    """
    found = read_calibration_file(path)
    own = own_dtypes(found, policy_name, provers)
    wanted: dict[Pair, tuple[Feature, ...]] = {}
    for prover in provers:
        verifier = prover if prover in own else "float32"
        for fingerprint in (ACTIVATIONS, SAMPLING):
            pair = Pair(fingerprint.name, policy_name, prover, verifier)
            wanted[pair] = fingerprint.features
    for pair, features in wanted.items():
        if pair in found.pairs and found.pairs[pair].features != features:
            raise VerifyError(
                f"The calibration '{path}' was made by a version of shoal that measured other "
                "things: make another with `shoal verify calibrate`, or remove it."
            )
    if not wanted.keys() <= found.pairs.keys():
        raise VerifyError(
            f"The calibration '{path}' says nothing about {policy_name!r} in "
            f"{' and '.join(provers)}: make another with `shoal verify calibrate`, or remove it."
        )
    return found


def own_dtypes(known: Calibration, policy_name: str, provers: Collection[str]) -> tuple[str, ...]:
    """Return those of ``provers``' dtypes that ``known`` can judge in the same dtype."""
    own: list[str] = []
    for dtype in provers:
        pairs = {
            Pair(name, policy_name, dtype, dtype) for name in (ACTIVATIONS.name, SAMPLING.name)
        }
        if pairs <= known.pairs.keys():
            own.append(dtype)
    return tuple(own)


def read_calibration_file(path: Path) -> Calibration:
    try:
        return load_calibration(path)
    except CalibrationError as error:
        raise VerifyError(f"The calibration {error}.") from error


def calibrate_spec(
    model: str,
    env: str,
    dtypes: Sequence[str],
    claims: int,
    rate: float,
    out: Path,
    *,
    group: int,
    max_tokens: int,
    temperature: float,
    progress: Progress,
) -> dict[str, Any]:
    """Calibrate the policy named ``model`` into ``out``; return the object of ``shoal verify
    calibrate --json``.

    Its ``warning`` is empty unless there are too few claims for ``rate``. Raises VerifyError as
    `self_calibrate`, or if the file cannot be written.
    """
    use_threads()
    made = load_env(env, {})
    policy = load_policy(model, made, 0)
    agreed = Agreed(temperature, max_tokens or policy.max_tokens, group)
    sides = [cast(Dtype, dtype) for dtype in dtypes]
    name = policy_label(model)
    found = self_calibrate(
        policy, made, agreed, policy_name=name, claims=claims, dtypes=sides, progress=progress
    )
    warning = next(iter(found.pairs.values())).warning(rate)
    try:
        save_calibration(found, out)
    except OSError as error:
        raise VerifyError(
            f"Cannot write {str(out)!r} ({error.strerror}): choose another file or its permissions."
        ) from error
    pairs = [f"{prover} -> {verifier}" for prover, verifier in itertools.product(sides, sides)]
    warning = warning[:1].upper() + warning[1:]
    return {
        "policy": name,
        "claims": claims,
        "rate": rate,
        "pairs": pairs,
        "warning": warning,
        "out": str(out),
    }
