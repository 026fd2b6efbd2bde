"""Work of ``shoal verify``: check one stored claim on this machine, and calibrate a policy by its name."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from shoal.node.config.device import use_threads
from shoal.node.rl.environment import Env, Option
from shoal.node.rl.loading import load_env, load_policy
from shoal.node.rl.policy import Policy
from shoal.node.verify.audit.finding import Finding, NotCalibrated, NotCheckable, VerifyError
from shoal.node.verify.completions.checker import Checker, fingerprint, policy_label
from shoal.node.verify.completions.kind import Progress, calibrate, own_dtypes, self_calibrate
from shoal.node.verify.completions.material import Agreed, Dtype, Material, Stored, decode_material
from shoal.swarm.errors import MessageError
from shoal.verification.calibration.calibration import Calibration, CalibrationError, load_calibration


def inspect(stored: Stored, model: str, env: str | None, calibration: Path | None, claims: int) -> Finding:
    """Check ``stored`` with the policy that the user names; if a ``calibration`` is needed and not given, one is made from
    ``claims`` honest claims of the same snapshot.

    Raises NotCheckable and other ShoalErrors if this node cannot tell. Only built-in code, or code that the user names, is loaded.
    """
    use_threads()
    if not stored.signed:
        return Finding(False, "The claim is not signed by the peer that it names.")
    if fingerprint(stored.material) != stored.claim.fingerprint:
        return Finding(False, "The material is not the one that the claim names.")
    try:
        material = decode_material(stored.material)
    except MessageError as error:
        return Finding(False, str(error))
    made = _environment(material, env)
    name = policy_label(model)
    if stored.snapshot is None:
        raise NotCheckable(
            f"The claimed policy's weights {stored.claim.model.hex()}.safetensors are not beside the claim's file: put them there."
        )
    if material.policy != name:
        raise NotCheckable(f"The claim is of the policy {material.policy!r}, not of {name!r}: name it with --model.")

    def make() -> Policy:
        return load_policy(model, made, 0, 0)

    known = _loaded(calibration) if calibration else Calibration()
    own = own_dtypes(known, name, [material.dtype]) if calibration else (material.dtype,)
    checker = Checker(make, made, stored.agreed, known, name, own=own)
    try:
        return checker.check(stored.claim, stored.material, stored.snapshot)
    except NotCalibrated:
        if calibration is not None:
            raise
    # All tests that need no calibration have passed, so the policy holds the claimed weights.
    policy = checker.policy_for(material.dtype)
    honest = self_calibrate(policy, made, stored.agreed, policy_name=name, claims=claims, dtypes=[material.dtype])
    checker.calibration.pairs.update(honest.pairs)
    return checker.check(stored.claim, stored.material, stored.snapshot)


def _environment(material: Material, spec: str | None) -> Env:
    try:
        options = cast("dict[str, Option]", json.loads(material.env_config))
    except (ValueError, RecursionError):
        options = {}
    if spec is None and not re.fullmatch(r"[a-z0-9_]{1,64}", material.env):  # only a user decides what is imported
        raise NotCheckable(f"The claim is about {material.env!r}, which is not built in: name its file with --env.")
    return load_env(spec or material.env, options if isinstance(options, dict) else {})


def _loaded(path: Path) -> Calibration:
    try:
        return load_calibration(path)
    except CalibrationError as error:
        raise VerifyError(f"The calibration cannot be used: {error}.") from error


def report(stored: Stored, finding: Finding) -> dict[str, Any]:
    """Return the object that the command prints with ``--json``."""
    claim = stored.claim
    about = {"claim": claim.id.hex(), "peer": claim.peer, "run": claim.run, "round": claim.round, "slot": claim.slot}
    with contextlib.suppress(MessageError):
        material = decode_material(stored.material)
        about |= {"dtype": material.dtype, "kernel": material.kernel}
    found = {"accepted": finding.accepted, "reason": finding.reason, "statistics": finding.statistics, "seconds": finding.seconds}
    return {**found, **about, "model": claim.model.hex()}


def summary(report: dict[str, Any]) -> str:
    """Format the report for people."""
    head = "accepted" if report["accepted"] else "refused"
    lines = [f"{head}: {report['reason']}", f"claim {report['claim'][:16]} of {report['peer']}, round {report['round']}"]
    if "dtype" in report:
        lines.append(f"  computed in {report['dtype']} by {report['kernel']}, as its author says")
    lines += [f"  {name}: {value:.4g}" for name, value in report["statistics"].items()]
    return "\n".join(lines)


def calibrate_spec(
    model: str, env: str, dtypes: Sequence[str], claims: int, rate: float, out: Path, *, group: int, max_tokens: int,
    temperature: float, warm: int, progress: Progress,
) -> dict[str, Any]:  # fmt: skip
    """Calibrate the policy named ``model`` into ``out``; return the object of ``shoal verify calibrate --json``."""
    use_threads()
    made = load_env(env, {})
    policy = load_policy(model, made, 0, warm)
    agreed = Agreed(temperature, max_tokens or policy.max_tokens, group)
    sides = [cast(Dtype, dtype) for dtype in dtypes]
    name = policy_label(model)
    warning = calibrate(policy, made, agreed, out, policy_name=name, claims=claims, dtypes=sides, rate=rate, progress=progress)
    pairs = [f"{prover} -> {verifier}" for prover in sides for verifier in sides]
    return {"policy": name, "claims": claims, "rate": rate, "pairs": pairs, "warning": warning, "out": str(out)}
