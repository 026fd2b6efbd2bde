"""Checker of one claim with a policy of its own, cheapest tests first, without network.

A fault of a claim is a finding, one sentence for each kind; an error means that this node cannot
tell. A prover names the dtype that it computed in. A check in the same dtype repeats most of its
rounding; across dtypes the test is as lenient as the coarser one's, and small changes of the
weights pass.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Collection
from typing import cast

import torch

from shoal.node.rl.environment import Env
from shoal.node.rl.policy import Policy
from shoal.node.verify.errors import NotCalibrated, NotCheckable, VerifyError
from shoal.node.verify.finding import Finding, Measured
from shoal.node.verify.group import ACTIVATIONS, dtype_of, examine
from shoal.node.verify.material import (
    DTYPES,
    Agreed,
    Dtype,
    Material,
    decode_material,
    output_hash,
    seed_of,
)
from shoal.node.verify.snapshot import digest, load_snapshot, most_bytes
from shoal.swarm.errors import MessageError
from shoal.swarm.p2p.newest import Newest
from shoal.verification.calibration import Calibration, CalibrationError, Pair
from shoal.verification.consensus.records import Claim
from shoal.verification.fingerprints.fingerprint import Evidence
from shoal.verification.fingerprints.last_hidden import output_head

KEPT_SNAPSHOTS = 4
REFUSALS = {
    "activations": "The claimed policy does not compute these activations",
    "sampling": "The claimed policy would not have drawn these tokens",
}
"""By fingerprint."""


class _Wrong(Exception):
    """Refusal of a claim, with the reason in one sentence."""


class Checker:
    """Checker for one thread.

    ``make_policy`` makes its instance when first needed; ``policy_name`` as `policy_label` returns
    it.

    ``allowed``: dtypes of provers; those in ``own`` are checked in the same dtype, the others in
    float32.
    """

    most_material_bytes = Material.LIMIT

    def __init__(
        self,
        make_policy: Callable[[], Policy],
        env: Env,
        agreed: Agreed,
        calibration: Calibration,
        policy_name: str,
        allowed: Collection[str] = tuple(DTYPES),
        own: Collection[str] = (),
    ) -> None:
        self._make_policy = make_policy
        self._env = env
        self._agreed = agreed
        self.calibration = calibration
        self._name = policy_name
        self._allowed = allowed
        self._own = own
        self._policies: dict[torch.dtype, Policy] = {}
        self._measured: list[Measured] = []
        """Of the claim that is being checked."""
        self._snapshots = Newest[bytes, bytes](KEPT_SNAPSHOTS)
        self._loaded: dict[torch.dtype, bytes] = {}
        """Digests of the snapshots that the policies hold."""

    @property
    def policy(self) -> Policy:
        """Own instance of the policy, in float32."""
        return self.policy_for("")

    def policy_for(self, prover: str) -> Policy:
        """Return the instance that checks claims of that dtype.

        A prover rounds the weights of float32 in the same way.
        """
        dtype = torch.float32
        if prover in self._own:
            dtype = DTYPES[cast(Dtype, prover)]
        if dtype not in self._policies:
            made = self._make_policy() if dtype == torch.float32 else copy.deepcopy(self.policy)
            made.module.to(dtype).eval()
            self._policies[dtype] = made
        return self._policies[dtype]

    def knows(self, model: bytes) -> bool:
        return model in self._snapshots

    @property
    def most_snapshot_bytes(self) -> int:
        return most_bytes(self.policy.module)

    def check(self, claim: Claim, material: bytes, snapshot: bytes | None) -> Finding:
        """Check ``claim`` with its author's ``material``; ``snapshot`` may be None if
        ``knows(claim.model)``.

        Raises NotCheckable if this node cannot tell: a dtype that was not calibrated, no snapshot,
        an environment that fails, or numbers that overflow in the own dtype; and whatever making
        the own policy raises.
        """
        begin = time.perf_counter()
        statistics: dict[str, float] = {"tokens": float(claim.tokens)}
        self._measured.clear()
        try:
            reason = self._check(claim, material, snapshot, statistics)
            accepted = True
        except _Wrong as wrong:
            accepted = False
            reason = str(wrong)
        return Finding(
            accepted, reason, statistics, time.perf_counter() - begin, tuple(self._measured)
        )

    def _check(
        self, claim: Claim, data: bytes, snapshot: bytes | None, statistics: dict[str, float]
    ) -> str:
        material = self._opened(claim, data)
        prompt = self._prompt(claim, material)
        rows = self._rows(claim, material)
        # getattr, because to mypy the head may be any module.
        width = int(getattr(output_head(self.policy.module), "weight").shape[1])  # noqa: B009
        expected = ACTIVATIONS.proof_bytes(claim.tokens, width)
        if len(material.proof) != expected:
            raise _Wrong(
                f"The proof has {len(material.proof)} bytes, but one of {claim.tokens} tokens has "
                f"{expected}."
            )
        if not any(material.proof):
            raise _Wrong("The proof is empty: all of its bytes are zero.")
        policy = self.policy_for(material.dtype)
        self._load(policy, claim.model, material.snapshot, snapshot)
        try:
            found = examine(policy, prompt, rows, material.proof, self._agreed, claim.seed)
        except ValueError as error:
            self._loaded.clear()
            dtype = dtype_of(policy)
            if dtype != "float32":
                raise NotCheckable(
                    f"The claim cannot be checked in {dtype} ({error}): check in float32."
                ) from error
            raise _Wrong(
                f"The claimed policy computes nonsense for these tokens: {error}."
            ) from None
        return self._judge(found, material, dtype_of(policy), statistics)

    # -- cheap tests -------------------------------------------------------------------------------

    def _opened(self, claim: Claim, data: bytes) -> Material:
        if digest(data) != claim.fingerprint:
            raise _Wrong("The material is not the one that the claim names.")
        try:
            material = decode_material(data)
        except MessageError as error:
            raise _Wrong(str(error)) from None
        if material.coordinates.hash != claim.prompt:
            raise _Wrong("The material is about another question than the claim.")
        if claim.seed != seed_of(claim.run, claim.round, claim.peer, claim.slot, claim.prompt):
            raise _Wrong(
                "The seed is not the one that this peer had to use for this round, slot and "
                "question."
            )
        if claim.sampling != self._agreed.hash:
            raise _Wrong(
                "The completions are claimed to be drawn with other settings than the swarm agreed "
                "on."
            )
        if material.policy != self._name:
            raise _Wrong(
                f"The claim is of the policy {material.policy!r} where the swarm agreed on "
                f"{self._name!r}."
            )
        if material.dtype not in self._allowed:
            raise _Wrong(
                f"The completions are claimed to be computed in {material.dtype}, which the swarm "
                "does not allow."
            )
        return material

    def _prompt(self, claim: Claim, material: Material) -> str:
        if not self._env.knows(material.env, material.env_version, material.env_config):
            raise _Wrong(
                "The question is of another environment, version or options than the swarm's."
            )
        try:
            return self._env.made.question(material.seed, material.index).prompt
        # Every pair of numbers has a question, so the user's environment is at fault here.
        except Exception as error:
            raise NotCheckable(
                f"The claim cannot be checked: this node's environment failed to make the question "
                f"({type(error).__name__})."
            ) from error

    def _rows(self, claim: Claim, material: Material) -> list[tuple[int, ...]]:
        rows = material.rows()
        if len(rows) != self._agreed.group:
            raise _Wrong(
                f"The group has {len(rows)} completions where {self._agreed.group} are agreed."
            )
        if sum(map(len, rows)) != claim.tokens or output_hash(rows) != claim.output:
            raise _Wrong("The tokens are not those that the claim names.")
        for number, (row, finish) in enumerate(zip(rows, material.finish, strict=True)):
            self._check_row(row, finish, f"Completion {number + 1} of {len(rows)}")
        return rows

    def _check_row(self, row: tuple[int, ...], finish: str, where: str) -> None:
        """Refuse tokens that the policy does not know, and completions that end otherwise than
        drawing ends; ``where``: which one it is, in words.
        """
        vocabulary = self.policy.vocabulary
        most = self._agreed.max_tokens
        if not all(0 <= token < vocabulary for token in row):
            raise _Wrong(f"{where} has a token that the policy does not know.")
        if len(row) > most:
            raise _Wrong(f"{where} has {len(row)} tokens where at most {most} are agreed.")
        ended = [place for place, token in enumerate(row) if self.policy.ends(token)]
        if ended and ended[0] < len(row) - 1:
            raise _Wrong(f"{where} goes on after its end.")
        if not ended and len(row) < most:
            raise _Wrong(
                f"{where} is truncated: it stops after {len(row)} of {most} tokens without an end."
            )
        if finish != ("stop" if ended else "length"):
            raise _Wrong(f"{where} says that it ended otherwise than it did.")

    # -- costly tests ------------------------------------------------------------------------------

    def _load(self, policy: Policy, model: bytes, nbytes: int, data: bytes | None) -> None:
        """Load the snapshot of that digest into ``policy``."""
        if data is not None:
            if digest(data) != model:
                raise _Wrong("The snapshot is not the one that the claim names.")
        else:
            data = self._snapshots.get(model)
        if data is None:
            raise NotCheckable(
                "The snapshot of the claimed policy is not here: fetch it from the claim's author."
            )
        if len(data) != nbytes:
            raise _Wrong(f"The snapshot has {len(data)} bytes where the material says {nbytes}.")
        dtype = DTYPES[cast(Dtype, dtype_of(policy))]
        if model != self._loaded.get(dtype):
            try:
                load_snapshot(policy.module, data)
            except VerifyError as error:
                raise _Wrong(str(error)) from None
            self._loaded[dtype] = model
        self._snapshots[model] = data

    def _judge(
        self,
        found: dict[str, Evidence],
        material: Material,
        dtype: str,
        statistics: dict[str, float],
    ) -> str:
        wrong = ""
        for name, evidence in found.items():
            pair = Pair(name, self._name, material.dtype, dtype)
            try:
                judged = self.calibration.judge(pair, evidence)
            except CalibrationError as error:
                raise NotCalibrated(f"The claim cannot be judged: {error}.") from error
            honest = self.calibration.pairs.get(pair)
            if honest is not None and honest.features == evidence.features and not evidence.fault:
                self._measured.append(Measured(pair, honest, evidence, material.kernel))
            if math.isfinite(judged.statistic):
                statistics[f"{name}_statistic"] = judged.statistic
                statistics[f"{name}_threshold"] = judged.threshold
                means = zip(evidence.features, evidence.means(), strict=True)
                statistics.update({feature.name: mean for feature, mean in means})
            if not judged.accepted and not wrong:
                wrong = f"{REFUSALS[name]} ({judged.reason})."
        if wrong:
            raise _Wrong(wrong)
        return (
            "The claimed policy wrote these completions: activations and drawing are as honest "
            "ones are."
        )
