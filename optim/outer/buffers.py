"""Selection of the buffers that are averaged beside the parameters."""

from __future__ import annotations

from torch import Tensor, nn


def float_buffers(model: nn.Module) -> list[Tensor]:
    """Return the model's floating-point buffers that are in its state_dict, each once; so no counters and masks."""
    saved = model.state_dict(keep_vars=True)
    return [buffer for name, buffer in model.named_buffers() if name in saved and buffer.is_floating_point()]
