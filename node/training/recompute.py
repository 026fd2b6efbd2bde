"""Activations computed again in the backward pass, in place of being kept (``train.recompute``)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoal.node.training.flop_count import FlopCount, repeated
from shoal.node.training.training_error import TrainingError
from shoal.optim.layers import repeated_blocks

CACHE_ARGUMENTS = ("past_key_values", "past_key_value", "layer_past", "cache_params")
"""Arguments that a block of transformers changes, so that it must not run twice."""


def recompute(model: nn.Module) -> None:
    """Let the repeated blocks of ``model`` keep only their inputs for the backward pass.

    The gradients stay the same, bit by bit, also with dropout. Names and classes of modules do not
    change. Models of transformers keep no cache of keys unless a call asks for it.

    Raises TrainingError: the model has no repeated blocks.
    """
    found = repeated_blocks(model)
    if not found:
        raise TrainingError(
            "The model has no repeated blocks to compute again (modules of one class in a "
            "ModuleList or Sequential): leave train.recompute out, or use torch.utils.checkpoint "
            "in the model itself."
        )
    for block in found:
        # An attribute of the module, so its hooks, which FSDP has too, stay outside. A partial of a
        # bound method is copied with it.
        # By setattr, for mypy takes the name for a method.
        setattr(block, "forward", partial(_recomputing, block.forward))  # noqa: B010
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = False


def _recomputing(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled() or any(kwargs.get(name) is not None for name in CACHE_ARGUMENTS):
        return forward(*args, **kwargs)
    if FlopCount.current is not None:  # not always: torch cannot compile it with every context
        kwargs["context_fn"] = lambda: (nullcontext(), repeated())
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
