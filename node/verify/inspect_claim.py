"""Work of ``shoal verify check``: a stored claim, checked with a policy that the user names.

Only built-in code, or code that the user names, is loaded.
"""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any, cast

from shoal.node.config.device import use_threads
from shoal.node.rl.environment import Env, Option
from shoal.node.rl.loading import load_env, load_policy
from shoal.node.rl.policy import Policy
from shoal.node.verify.calibrate import own_dtypes, read_calibration_file, self_calibrate
from shoal.node.verify.checker import Checker
from shoal.node.verify.claim_file import Stored
from shoal.node.verify.errors import NotCalibrated, NotCheckable
from shoal.node.verify.finding import Finding
from shoal.node.verify.material import Material, decode_material
from shoal.node.verify.proven_group import policy_label
from shoal.node.verify.snapshot import digest
from shoal.swarm.errors import MessageError
from shoal.verification.calibration import Calibration


def inspect(
    stored: Stored, model: str, env: str | None, calibration: Path | None, claims: int
) -> Finding:
    """Check ``stored`` with the policy that the user names; if a ``calibration`` is needed and not
    given, one is made from ``claims`` honest claims of the same snapshot.

    Raises NotCheckable and other ShoalErrors if this node cannot tell.
    """
    use_threads()
    if not stored.signed:
        return Finding(False, "The claim is not signed by the peer that it names.")
    if digest(stored.material) != stored.claim.fingerprint:
        return Finding(False, "The material is not the one that the claim names.")
    try:
        material = decode_material(stored.material)
    except MessageError as error:
        return Finding(False, str(error))
    made = _environment(material, env)
    name = policy_label(model)
    _check_named(stored, material, name)

    def make() -> Policy:
        # The snapshot has all of tiny.
        spec = "tiny:copy:0" if name == "tiny" else model
        return load_policy(spec, made, 0)

    known = Calibration()
    own: tuple[str, ...] = (material.dtype,)
    if calibration is not None:
        known = read_calibration_file(calibration)
        own = own_dtypes(known, name, [material.dtype])
    checker = Checker(make, made, stored.agreed, known, name, own=own)
    try:
        return checker.check(stored.claim, stored.material, stored.snapshot)
    except NotCalibrated:
        if calibration is not None:
            raise
    # All tests that need no calibration have passed, so the policy holds the claimed weights.
    policy = checker.policy_for(material.dtype)
    honest = self_calibrate(
        policy, made, stored.agreed, policy_name=name, claims=claims, dtypes=[material.dtype]
    )
    checker.calibration.pairs.update(honest.pairs)
    return checker.check(stored.claim, stored.material, stored.snapshot)


def _check_named(stored: Stored, material: Material, name: str) -> None:
    """Raise NotCheckable unless the claimed weights are there, and of the policy ``name``."""
    if stored.snapshot is None:
        raise NotCheckable(
            f"The claimed policy's weights {stored.claim.model.hex()}.safetensors are not beside "
            "the claim's file: put them there."
        )
    if material.policy != name:
        raise NotCheckable(
            f"The claim is of the policy {material.policy!r}, not of {name!r}: name it with "
            "--model."
        )


def _environment(material: Material, spec: str | None) -> Env:
    # Only a user decides what is imported.
    if spec is None and not re.fullmatch(r"[a-z0-9_]{1,64}", material.env):
        raise NotCheckable(
            f"The claim is about {material.env!r}, which is not built in: name its file with --env."
        )
    try:
        options = cast("dict[str, Option]", json.loads(material.env_config))
    except (ValueError, RecursionError):
        options = {}
    return load_env(spec or material.env, options if isinstance(options, dict) else {})


def report(stored: Stored, finding: Finding) -> dict[str, Any]:
    """Return the object that the command prints with ``--json``."""
    claim = stored.claim
    about = {
        "claim": claim.id.hex(),
        "peer": claim.peer,
        "run": claim.run,
        "round": claim.round,
        "slot": claim.slot,
    }
    with contextlib.suppress(MessageError):
        material = decode_material(stored.material)
        about |= {"dtype": material.dtype, "kernel": material.kernel}
    found = {
        "accepted": finding.accepted,
        "reason": finding.reason,
        "statistics": finding.statistics,
        "seconds": finding.seconds,
    }
    return {**found, **about, "model": claim.model.hex()}


def summary(report: dict[str, Any]) -> str:
    head = "accepted" if report["accepted"] else "refused"
    lines = [
        f"{head}: {report['reason']}",
        f"claim {report['claim'][:16]} of {report['peer']}, round {report['round']}",
    ]
    if "dtype" in report:
        lines.append(f"  computed in {report['dtype']} by {report['kernel']}, as its author says")
    lines += [f"  {name}: {value:.4g}" for name, value in report["statistics"].items()]
    return "\n".join(lines)
