"""torch's optimizers without torch's compiler.

When an optimizer of torch is made, and when it steps, it imports ``torch._dynamo``, only to keep itself out of functions that are
being compiled: 1.2 to 1.7 s of a processor, as long as torch itself, and a quarter of what a node needed up to its first step. A
node that compiles nothing does without.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch

KEPT_OUT = "__dynamo_disable"
"""Attribute in which torch keeps what it calls in place of a method that is not to be compiled, once it has made that."""


def without_compiler() -> None:
    """Keep optimizers from importing the compiler, unless it is there already. What they compute does not change.

    Where a later version of torch does it in another way they import it as ever.
    """
    if "torch._dynamo" in sys.modules:
        return
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        plain = inspect.unwrap(getattr(torch.optim.Optimizer, name))
        setattr(plain, KEPT_OUT, plain)
    for kind in (torch.optim.Adam, torch.optim.SGD):  # AdamW has Adam's
        if "step" in vars(kind) and hasattr(kind.step, "__wrapped__"):
            setattr(kind, "step", _as_torch_steps(inspect.unwrap(kind.step)))  # noqa: B010 (mypy: a method)


def _as_torch_steps(plain: Any) -> Any:
    """Return the method that takes a step without recording gradients, as torch's own decorator has it."""

    @functools.wraps(plain)
    def step(self: torch.optim.Optimizer, *arguments: Any, **named: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return plain(self, *arguments, **named)

    return step
