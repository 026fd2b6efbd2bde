"""Which buffers of a model are averaged beside its parameters."""

from __future__ import annotations

from torch import Tensor, nn


def float_buffers(model: nn.Module) -> list[Tensor]:
    """The model's floating-point buffers that are part of its state_dict, each once. Counters and masks are not among them."""
    saved = model.state_dict(keep_vars=True)
    return [buffer for name, buffer in model.named_buffers() if name in saved and buffer.is_floating_point()]
