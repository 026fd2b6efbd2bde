"""A node of ``shoal demo --cheat`` that cheats: it writes with weights of 4 bits, and claims that
its policy did.

``python -m shoal.node.demo.cheating up|join ...`` takes what ``python -m shoal`` does.
"""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shoal.node.rl import loading, rollout_sharing
from shoal.node.rl.environment import Policy
from shoal.node.verify import checker, completions

STEPS = 2**3 - 1  # of 4 bits, on either side of 0


@contextmanager
def rounded(module: torch.nn.Module) -> Iterator[None]:
    """Round the rows of all matrices to 4 bits within the block."""
    kept = [(weight, weight.detach().clone()) for weight in module.parameters() if weight.ndim == 2]
    try:
        for weight, before in kept:
            step = before.abs().amax(1, keepdim=True).clamp_min(1e-8) / STEPS
            weight.detach().copy_((before / step).round() * step)
        yield
    finally:
        for weight, before in kept:
            weight.detach().copy_(before)


def cheat() -> None:
    load = loading.load_policy
    prove = checker.prove

    def cheap(*given: Any) -> Policy:
        policy = load(*given)
        kind: Any = type(policy)
        generate = kind.generate

        def write(writer: Policy, *given: Any, temperature: float, **more: Any) -> Any:
            if (
                writer is not policy or not temperature
            ):  # a copy, for its honest checks of others, or an evaluation
                return generate(writer, *given, temperature=temperature, **more)
            with rounded(policy.module):
                return generate(writer, *given, temperature=temperature, **more)

        kind.generate = write
        return policy

    def claim(policy: Policy, *given: Any, **more: Any) -> Any:
        with rounded(policy.module):
            return prove(policy, *given, **more)

    for module, name, ours in (
        (rollout_sharing, "load_policy", cheap),
        (completions, "prove", claim),
    ):
        setattr(module, name, ours)


if __name__ == "__main__":
    cheat()
    runpy.run_module("shoal", run_name="__main__", alter_sys=True)
