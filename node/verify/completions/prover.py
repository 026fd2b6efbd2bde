"""Writing a group of completions such that others can check who wrote it, and the claim that says so."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from shoal.node.rl.environment import Env
from shoal.node.rl.policy import Completion, Policy
from shoal.node.verify.audit.errors import VerifyError
from shoal.node.verify.completions.examination import ACTIVATIONS, dtype_of, write
from shoal.node.verify.completions.material import Agreed, Coordinates, encode, material_of, output_hash, seed_of
from shoal.verification.consensus.records import Claim


@dataclass(frozen=True)
class Proven:
    """A group that can be claimed. ``material``: to be handed out to those who ask for `Claim.fingerprint`."""

    at: Coordinates
    agreed: Agreed
    seed: int
    completions: list[Completion]
    material: bytes

    @property
    def tokens(self) -> int:
        """Of all completions."""
        return sum(len(one.tokens) for one in self.completions)


def policy_label(spec: str) -> str:
    """A policy's name among peers: tiny whatever its habit was, since a snapshot holds all of it; a model's without its folder."""
    kind, _, rest = spec.partition(":")
    name = kind if kind == "tiny" else f"{kind}:{rest.rstrip('/').rpartition('/')[2]}"
    return re.sub(r"[^A-Za-z0-9_.:+-]", "_", name)[:128]


def prove(
    policy: Policy, env: Env, at: Coordinates, agreed: Agreed, seed: int, *, policy_name: str, snapshot_bytes: int,
    planted_prompt: str | None = None,
) -> Proven:  # fmt: skip
    """Write a group of completions of the question ``at``, drawn with ``seed`` (`seed_of`), and prove which policy did.

    The dtype is that of the policy's module. ``planted_prompt``: of another question, which is answered in place of the one that
    is claimed, so that the claim is wrong and cannot be told from others without checking.

    Raises VerifyError if the policy cannot write ``agreed.max_tokens`` tokens or computes nonsense.
    """
    prompt = env.made.question(at.seed, at.index).prompt if planted_prompt is None else planted_prompt
    try:
        completions, states = write(policy, prompt, agreed, seed)
        proof = ACTIVATIONS.make(states)
    except ValueError as error:
        raise VerifyError(f"The policy's answers cannot be proved ({error}): mend the policy, or turn verification off.") from error
    short = [len(one.tokens) for one in completions if one.finish == "length" and len(one.tokens) != agreed.max_tokens]
    if short:
        raise VerifyError(
            f"The policy stops after {short[0]} tokens where {agreed.max_tokens} are agreed: set rl.max_tokens to {short[0]}."
        )
    rows = [one.tokens for one in completions]
    finish = [one.finish for one in completions]
    material = material_of(at, rows, finish, proof=proof, policy=policy_name, dtype=dtype_of(policy), snapshot=snapshot_bytes)
    return Proven(at, agreed, seed, completions, encode(material))


def make_claim(proven: Proven, *, run: str, round: int, peer: str, slot: int, model: bytes) -> Claim:
    """The record to sign and publish; ``model`` is the SHA-256 of the policy's snapshot.

    Raises ValueError if ``proven`` was drawn with another seed than that of this round and slot.
    """
    if proven.seed != seed_of(run, round, peer, slot, proven.at.hash):
        raise ValueError("the group was drawn with the seed of another claim")
    return claim_of(proven, run=run, round=round, peer=peer, slot=slot, model=model)


def claim_of(proven: Proven, *, run: str, round: int, peer: str, slot: int, model: bytes) -> Claim:
    """``make_claim`` without a look at the seed."""
    output = output_hash([one.tokens for one in proven.completions])
    return Claim(
        peer=peer, run=run, round=round, slot=slot, model=model, prompt=proven.at.hash, sampling=proven.agreed.hash,
        seed=proven.seed, tokens=proven.tokens, output=output, fingerprint=fingerprint(proven.material),
    )  # fmt: skip


def fingerprint(material: bytes) -> bytes:
    """For `Claim.fingerprint`: the SHA-256 by which the material is asked for."""
    return hashlib.sha256(material).digest()
