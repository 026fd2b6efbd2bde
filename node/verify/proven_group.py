"""Prover of completions: a group written so that others can check which policy wrote it, and its
claim.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from shoal.node.config.rl_settings import served_by
from shoal.node.rl.environment import Env
from shoal.node.rl.policy import Completion, Policy
from shoal.node.verify.errors import VerifyError
from shoal.node.verify.group import ACTIVATIONS, kernel_of, write
from shoal.node.verify.material import DTYPES, Agreed, Coordinates, material_of, output_hash
from shoal.node.verify.snapshot import digest
from shoal.swarm.wire.envelope import pack
from shoal.verification.consensus.records import Claim

MAX_LABEL_CHARS = 128


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
    policy, _ = served_by(spec)
    kind, _, rest = policy.partition(":")
    name = kind
    if kind != "tiny":
        name += ":" + rest.rstrip("/").rpartition("/")[2]
    return re.sub(r"[^A-Za-z0-9_.:+-]", "_", name)[:MAX_LABEL_CHARS]


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
    prompt = planted_prompt
    if prompt is None:
        prompt = env.made.question(at.seed, at.index).prompt
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
    for one in completions:
        length = len(one.tokens)
        if one.finish == "length" and length != agreed.max_tokens:
            raise VerifyError(
                f"The policy stops after {length} tokens where {agreed.max_tokens} are agreed: set "
                f"rl.max_tokens to {length}."
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
