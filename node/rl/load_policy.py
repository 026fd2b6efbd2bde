"""The policy that a user names: ``tiny``, ``tiny:HABIT`` or ``hf:PATH_OR_NAME``."""

from __future__ import annotations

from node.rl.environment import Env
from node.rl.policy import Policy, PolicyError


def load_policy(spec: str, env: Env, seed: int) -> Policy:
    """The policy, on the CPU. PolicyError says in one sentence what is wrong with the name, or what is missing."""
    kind, _, rest = spec.partition(":")
    if kind == "tiny":
        from node.rl.tiny import Tiny

        return Tiny(env.made, rest or "copy", seed=seed)
    if kind == "hf" and rest:
        from node.rl.hf import load_hf

        return load_hf(rest)
    raise PolicyError(f"There is no policy {spec!r}: choose tiny, tiny:HABIT, or hf: and a model's folder, file or name.")
