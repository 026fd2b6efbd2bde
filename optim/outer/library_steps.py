"""What GradScaler, accelerate and torch.distributed.checkpoint ask of ``OuterOptimizer.step``.

After an overflow GradScaler (float16) wants the inner step left out; in the middle of an
accumulation accelerate's wrapper leaves it out; and torch.distributed.checkpoint calls ``step``
only to make an optimizer's state.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from shoal.optim.device import widest_float
from shoal.optim.outer.inner import parts_of
from shoal.optim.outer.sharded import local


def is_mid_accumulation(inner: torch.optim.Optimizer) -> bool:
    """Return True if accelerate has prepared ``inner`` and is in the middle of an accumulation.

    Its wrapper then leaves the step out, so no step is to be counted.
    """
    for one in parts_of(inner):
        # What accelerate puts there.
        if hasattr(one, "gradient_state") and not one.gradient_state.sync_gradients:
            return True
    return False


def only_makes_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the optimizer has no state yet, and all its rates and gradients are 0.

    In this way torch.distributed.checkpoint's ``get_optimizer_state_dict`` and
    ``set_optimizer_state_dict`` have a new optimizer make its state.
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

    Parts that unscale and skip in their own kernels (torch's fused ones) get both tensors
    themselves. Only if all parts are such does nothing here wait for the device.

    Args:
        scale: GradScaler's ``grad_scale``; None if the gradients are divided already.
        overflow: GradScaler's ``found_inf``, above 0 if a gradient is infinite or NaN.

    Raises:
        ValueError: ``scale`` is given, and a part that is not fused has gradients in float16.
    """
    parts = parts_of(inner)
    fused = [one for one in parts if _scales_itself(one)]
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


def _scales_itself(optimizer: torch.optim.Optimizer) -> bool:
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    # In torch's older contract step takes the scaler as an argument, and reads no grad_scale.
    return "grad_scaler" not in inspect.signature(optimizer.step).parameters


def _parameters(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[Tensor]:
    for one in optimizers:
        for group in one.param_groups:
            yield from group["params"]


@torch.no_grad()
def unscale(params: Iterable[Tensor], scale: Tensor) -> None:
    """Divide the gradients by ``scale``, to the same bits as ``GradScaler.unscale_``."""
    inverse = scale.to(widest_float(scale.device)).reciprocal().float()
    by_device: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    for param in params:
        if param.grad is None:
            continue
        if param.grad.dtype == torch.float16:
            raise ValueError(
                "Attempting to unscale FP16 gradients: keep the parameters in float32, and "
                "compute in autocast."
            )
        gradient = local(param.grad)
        by_device[gradient.device].append(gradient._values() if gradient.is_sparse else gradient)
    for device, gradients in by_device.items():
        torch._foreach_mul_(gradients, inverse.to(device))
