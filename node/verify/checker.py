"""Checker of one claim with a policy of its own, cheapest tests first, without network.

A fault of a claim is a finding, one sentence for each kind; an error means that this node cannot
tell. A prover names the dtype that it computed in. A check in the same dtype repeats most of its
rounding; across dtypes the test is as lenient as the coarser one's, and small changes of the
weights pass.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import re
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from shoal.node.config.settings import served_by
from shoal.node.rl.environment import Env
from shoal.node.rl.policy import Choose, Completion, Policy
from shoal.node.verify.audit import (
    Finding,
    Measured,
    NotCalibrated,
    NotCheckable,
    VerifyError,
    digest,
    load_snapshot,
    most_bytes,
)
from shoal.node.verify.material import (
    DTYPES,
    Agreed,
    Coordinates,
    Dtype,
    Material,
    decode_material,
    material_of,
    output_hash,
    seed_of,
)
from shoal.swarm.errors import MessageError
from shoal.swarm.p2p.newest import Newest
from shoal.swarm.wire.envelope import pack
from shoal.verification.calibration import Calibration, CalibrationError, Pair
from shoal.verification.consensus.records import Claim
from shoal.verification.fingerprints.activations import ActivationProof
from shoal.verification.fingerprints.fingerprint import Evidence
from shoal.verification.fingerprints.last_hidden import LastHidden, output_head
from shoal.verification.fingerprints.sampling import Drawn, SeededSampling, draw_each, margins

# Generation of a group that can be checked, and its examination: in the same parts, so that only
# rounding may differ.
#
# A group is written at most PART completions at a time, each row with the same prompt, so nothing
# is padded before it. Token number s of completion number r is drawn by Gumbel-max with the noise
# of position r * STRIDE + s of the claim's seed.
#
# Autocast of the caller is off meanwhile, as it is a thread's: author and verifier compute in the
# dtype of the weights, unless the policy itself chooses another.

PART = 16  # completions at a time
AT_ONCE = (
    4096  # tokens of completions in one call of the module, which bounds the memory for logits
)
STRIDE = 1 << 20
ACTIVATIONS = ActivationProof()
SAMPLING = SeededSampling()


def together(agreed: Agreed) -> int:
    """Return how many completions go into one call of the module."""
    return max(1, min(PART, AT_ONCE // agreed.max_tokens))


@dataclass(frozen=True)
class WrittenGroup:
    """Completions of one prompt, the states (n, width) of their n tokens, row after row, and the
    dtype of the computation.
    """

    completions: list[Completion]
    states: Tensor
    dtype: str


@torch.no_grad()
def write(policy: Policy, prompt: str, agreed: Agreed, seed: int) -> WrittenGroup:
    """Write ``agreed.group`` completions of ``prompt``."""
    written: list[Completion] = []
    states: list[Tensor] = []
    dtype = ""
    for first in range(0, agreed.group, together(agreed)):
        count = min(together(agreed), agreed.group - first)
        with _plain(policy), LastHidden(policy.module) as hidden:
            part = policy.generate(
                [prompt] * count,
                1,
                temperature=agreed.temperature,
                max_tokens=agreed.max_tokens,
                seed=0,
                choose=_chooser(seed, agreed.temperature, first),
            )
        found = hidden.states()
        dtype = _name(hidden.dtype)
        written += [one for (one,) in part]
        states += [row[: len(one.tokens)] for row, (one,) in zip(found, part, strict=True)]
    return WrittenGroup(written, torch.cat(states), dtype)


def _plain(policy: Policy) -> contextlib.AbstractContextManager[object]:
    device = next(policy.module.parameters()).device.type
    return (
        torch.autocast(device, enabled=False)
        if torch.amp.is_autocast_available(device)
        else contextlib.nullcontext()
    )


def _chooser(seed: int, temperature: float, first: int) -> Choose:
    steps = itertools.count()

    def choose(logits: Tensor) -> Tensor:
        step = next(steps)
        positions = range(first * STRIDE + step, (first + len(logits)) * STRIDE + step, STRIDE)
        return draw_each(logits, seed.to_bytes(8, "big"), positions, temperature)

    return choose


@torch.no_grad()
def read(
    policy: Policy, prompt: str, rows: Sequence[Sequence[int]], agreed: Agreed, seed: int
) -> tuple[Tensor, Tensor]:
    """Return the own states (n, width) of the n tokens of all ``rows``, and their margins (n,) with
    ``seed``, by prefills.

    Raises ValueError if the policy's numbers for these tokens are not finite, or it cannot read so
    many tokens.
    """
    states: list[Tensor] = []
    found: list[Tensor] = []
    for first in range(0, len(rows), together(agreed)):
        part = rows[first : first + together(agreed)]
        with _plain(policy), LastHidden(policy.module, every=True) as hidden:
            logits, mask = policy.logits([prompt] * len(part), part)
        own = hidden.states()[:, -logits.shape[1] :]
        for number, row in enumerate(part):
            if int(mask[number].sum()) != len(row):
                raise ValueError(f"the policy cannot read {len(row)} tokens")
            kept = slice(0, len(row))
            tokens = torch.tensor(list(row), dtype=torch.int64, device="cpu")
            drawn = Drawn(
                tokens,
                logits[number, kept],
                seed.to_bytes(8, "big"),
                agreed.temperature,
                (first + number) * STRIDE,
            )
            found.append(margins(drawn))
            states.append(own[number, kept])
    return torch.cat(states), torch.cat(found)


def examine(
    policy: Policy,
    prompt: str,
    rows: Sequence[Sequence[int]],
    proof: bytes,
    agreed: Agreed,
    seed: int,
) -> dict[str, Evidence]:
    """Measure how far ``proof`` and the tokens are from what ``policy`` computes for them, by
    fingerprint.

    Raises ValueError as `read`; faults of the proof are in the evidence.
    """
    states, found = read(policy, prompt, rows, agreed, seed)
    return {
        ACTIVATIONS.name: ACTIVATIONS.compare(proof, states),
        SAMPLING.name: SAMPLING.measured(found),
    }


def dtype_of(policy: Policy) -> str:
    return _name(next(policy.module.parameters()).dtype)


def kernel_of(policy: Policy) -> str:
    """Return what computes ``policy``, such as "torch 2.13.0+cpu, cpu AVX512"."""
    device = next(policy.module.parameters()).device
    kind = f" {torch.backends.cpu.get_cpu_capability()}" if device.type == "cpu" else ""
    if device.type == "cuda":
        kind = " {}.{}".format(*torch.cuda.get_device_capability(device))
    return f"torch {torch.__version__}, {device.type}{kind}"[:64]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Prover of completions: a group written so that others can check which policy wrote it, and its
# claim.


@dataclass(frozen=True)
class ProvenGroup:
    """Group that can be claimed. ``material`` is served to those who ask for
    `Claim.fingerprint`.
    """

    at: Coordinates
    agreed: Agreed
    seed: int
    completions: list[Completion]
    material: bytes

    @property
    def tokens(self) -> int:
        return sum(len(one.tokens) for one in self.completions)


def policy_label(spec: str) -> str:
    """Return a policy's name among peers: tiny without its habit, since a snapshot holds it; a
    model without folder and server.
    """
    kind, _, rest = served_by(spec)[0].partition(":")
    name = kind if kind == "tiny" else f"{kind}:{rest.rstrip('/').rpartition('/')[2]}"
    return re.sub(r"[^A-Za-z0-9_.:+-]", "_", name)[:128]


def prove(
    policy: Policy,
    env: Env,
    at: Coordinates,
    agreed: Agreed,
    seed: int,
    *,
    policy_name: str,
    snapshot_bytes: int,
    planted_prompt: str | None = None,
    allowed: Collection[str] = tuple(DTYPES),
) -> ProvenGroup:
    """Write a group of completions of the question ``at``, drawn with ``seed`` (`seed_of`), and
    prove which policy wrote it.

    The dtype is the one that the completions were really computed in, which must be among
    ``allowed``. ``planted_prompt``: of another question, which is answered in place of the claimed
    one, so that the claim is wrong but looks like others until it is checked.

    Raises VerifyError if the policy cannot write ``agreed.max_tokens`` tokens, computes nonsense,
    or computes in another dtype.
    """
    prompt = (
        env.made.question(at.seed, at.index).prompt if planted_prompt is None else planted_prompt
    )
    try:
        group = write(policy, prompt, agreed, seed)
        proof = ACTIVATIONS.make(group.states)
    except ValueError as error:
        raise VerifyError(
            f"The policy's answers cannot be proved ({error}): mend the policy, or turn "
            "verification off."
        ) from error
    if group.dtype not in allowed:
        raise VerifyError(
            f"The policy computes in {group.dtype}, where claims of completions are in "
            f"{' or '.join(allowed)}: give it weights of that dtype and no autocast of its own, or "
            "turn verification off."
        )
    completions = group.completions
    short = [
        len(one.tokens)
        for one in completions
        if one.finish == "length" and len(one.tokens) != agreed.max_tokens
    ]
    if short:
        raise VerifyError(
            f"The policy stops after {short[0]} tokens where {agreed.max_tokens} are agreed: set "
            f"rl.max_tokens to {short[0]}."
        )
    rows = [one.tokens for one in completions]
    finish = [one.finish for one in completions]
    material = material_of(
        at,
        rows,
        finish,
        proof=proof,
        policy=policy_name,
        dtype=group.dtype,
        kernel=kernel_of(policy),
        snapshot=snapshot_bytes,
    )
    return ProvenGroup(at, agreed, seed, completions, pack(material))


def make_claim(
    proven: ProvenGroup, *, run: str, round: int, peer: str, slot: int, model: bytes
) -> Claim:
    """Make the record to sign and publish; ``model`` is the SHA-256 of the policy's snapshot."""
    output = output_hash([one.tokens for one in proven.completions])
    return Claim(
        peer=peer,
        run=run,
        round=round,
        slot=slot,
        model=model,
        prompt=proven.at.hash,
        sampling=proven.agreed.hash,
        seed=proven.seed,
        tokens=proven.tokens,
        output=output,
        fingerprint=digest(proven.material),
    )


KEPT = 4  # snapshots
WORDS = {
    "activations": "The claimed policy does not compute these activations",
    "sampling": "The claimed policy would not have drawn these tokens",
}


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
        self._measured: list[Measured] = []  # of the claim that is being checked
        self._snapshots = Newest[bytes, bytes](KEPT)
        self._loaded: dict[
            torch.dtype, bytes
        ] = {}  # digests of the snapshots that the policies hold

    @property
    def policy(self) -> Policy:
        """Own instance of the policy, in float32."""
        return self.policy_for("")

    def policy_for(self, prover: str) -> Policy:
        """Return the instance that checks claims of that dtype.

        A prover rounds the weights of float32 in the same way.
        """
        dtype = DTYPES[cast(Dtype, prover)] if prover in self._own else torch.float32
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
        or numbers that overflow in the own dtype; and whatever making the own policy raises.
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
        width = int(getattr(output_head(self.policy.module), "weight").shape[1])  # noqa: B009 (mypy: any module)
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
            if (dtype := dtype_of(policy)) != "float32":
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
        except Exception as error:  # a user's code, given a stranger's numbers
            raise _Wrong(
                f"The environment has no question of these numbers ({type(error).__name__})."
            ) from error

    def _rows(self, claim: Claim, material: Material) -> list[tuple[int, ...]]:
        rows = material.rows()
        most = self._agreed.max_tokens
        if len(rows) != self._agreed.group:
            raise _Wrong(
                f"The group has {len(rows)} completions where {self._agreed.group} are agreed."
            )
        if sum(map(len, rows)) != claim.tokens or output_hash(rows) != claim.output:
            raise _Wrong("The tokens are not those that the claim names.")
        vocabulary = self.policy.vocabulary
        for number, (row, finish) in enumerate(zip(rows, material.finish, strict=True)):
            where = f"Completion {number + 1} of {len(rows)}"
            if not all(0 <= token < vocabulary for token in row):
                raise _Wrong(f"{where} has a token that the policy does not know.")
            if len(row) > most:
                raise _Wrong(f"{where} has {len(row)} tokens where at most {most} are agreed.")
            ended = [place for place, token in enumerate(row) if self.policy.ends(token)]
            if ended and ended[0] < len(row) - 1:
                raise _Wrong(f"{where} goes on after its end.")
            if not ended and len(row) < most:
                raise _Wrong(
                    f"{where} is truncated: it stops after {len(row)} of {most} tokens without an "
                    "end."
                )
            if finish != ("stop" if ended else "length"):
                raise _Wrong(f"{where} says that it ended otherwise than it did.")
        return rows

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
                statistics[f"{name}_statistic"], statistics[f"{name}_threshold"] = (
                    judged.statistic,
                    judged.threshold,
                )
                means = zip(evidence.features, evidence.means(), strict=True)
                statistics.update({feature.name: mean for feature, mean in means})
            if not judged.accepted and not wrong:
                wrong = f"{WORDS[name]} ({judged.reason})."
        if wrong:
            raise _Wrong(wrong)
        return (
            "The claimed policy wrote these completions: activations and drawing are as honest "
            "ones are."
        )
