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

from shoal.node.rl import loading
from shoal.node.rl.policy import Policy
from shoal.node.verify import claimer, proven_group

STEPS = 2**3 - 1
"""Of 4 bits, on either side of 0."""


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
    """Let this process write and claim by rounded weights from now on."""
    load = loading.load_policy
    prove = proven_group.prove

    def load_cheap(*given: Any) -> Policy:
        policy = load(*given)
        kind: Any = type(policy)
        generate = kind.generate

        def write(writer: Policy, *given: Any, temperature: float, **more: Any) -> Any:
            # Another policy is a copy, for its honest checks of others; temperature 0 is an
            # evaluation.
            if writer is not policy or not temperature:
                return generate(writer, *given, temperature=temperature, **more)
            with rounded(policy.module):
                return generate(writer, *given, temperature=temperature, **more)

        kind.generate = write
        return policy

    def prove_cheap(policy: Policy, *given: Any, **more: Any) -> Any:
        with rounded(policy.module):
            return prove(policy, *given, **more)

    loading.load_policy = load_cheap  # type: ignore[assignment]
    claimer.prove = prove_cheap  # type: ignore[attr-defined]


if __name__ == "__main__":
    cheat()
    runpy.run_module("shoal", run_name="__main__", alter_sys=True)
