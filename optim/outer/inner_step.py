"""One step of the inner optimizer, as libraries around a training loop expect it.

``GradScaler`` (float16) wants the step left out after an overflow, accelerate takes none in the
middle of an accumulation, and torch.distributed.checkpoint takes one to make an optimizer's state.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from shoal.optim.device import wide
from shoal.optim.outer.inner import parts_of
from shoal.optim.outer.sharded import local


def accumulates(inner: torch.optim.Optimizer) -> bool:
    """Return True in the middle of an accumulation, if accelerate has prepared ``inner``."""
    for one in parts_of(inner):
        if hasattr(one, "gradient_state") and not one.gradient_state.sync_gradients:
            return True
    return False


def initialises(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if a step now would only make the optimizer's state.

    There is none yet, and all rates and gradients are 0: so torch.distributed.checkpoint's
    ``get_optimizer_state_dict`` and ``set_optimizer_state_dict`` prepare a new optimizer.
    """
    if optimizer.state:
        return False
    if any(bool(group.get("lr", 1.0) != 0) for group in optimizer.param_groups):
        return False
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not parameter.requires_grad:
                continue
            if parameter.grad is None or bool(local(parameter.grad).any()):
                return False
    return True


def step_unless_overflow(
    inner: torch.optim.Optimizer, scale: Tensor | None, overflow: Tensor
) -> None:
    """Do what ``GradScaler`` does: divide gradients by ``scale``, and step if they are finite.

    Optimizers that do both in their own kernels (torch's fused ones) get both tensors, without a
    wait for the device.

    Args:
        scale: None if the gradients are divided already.
        overflow: above 0 if a gradient is not finite.

    Raises:
        ValueError: gradients in float16, which hold no master weights' gradients.
    """
    parts = parts_of(inner)
    fused = [one for one in parts if _is_fused(one)]
    others = [one for one in parts if one not in fused]
    if others:
        if scale is not None:
            unscale(_parameters(others), scale)
        if overflow.item():
            return
    for one in fused:
        vars(one).update(grad_scale=scale, found_inf=overflow)
    try:
        inner.step()
    finally:
        for one in fused:
            del vars(one)["grad_scale"], vars(one)["found_inf"]


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    # In torch's older contract the scaler is an argument of step.
    return "grad_scaler" not in inspect.signature(optimizer.step).parameters


def _parameters(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[Tensor]:
    for one in optimizers:
        for group in one.param_groups:
            yield from group["params"]


@torch.no_grad()
def unscale(params: Iterable[Tensor], scale: Tensor) -> None:
    """Divide the gradients by ``scale``, by the very operations of ``GradScaler.unscale_``."""
    inverse = scale.to(wide(scale.device)).reciprocal().float()
    found: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    for param in params:
        if param.grad is None:
            continue
        if param.grad.dtype == torch.float16:
            raise ValueError(
                "Attempting to unscale FP16 gradients: keep the parameters in float32, and "
                "compute in autocast."
            )
        gradient = local(param.grad)
        found[gradient.device].append(gradient._values() if gradient.is_sparse else gradient)
    for device, gradients in found.items():
        torch._foreach_mul_(gradients, inverse.to(device))
