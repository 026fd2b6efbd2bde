"""Mixed precision: which formats a device computes in.

Matrix products are computed in the chosen format by autocast; with float16 the loss is scaled
(`shoal.node.training.inner_step`). The weights stay as the task made them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor

from shoal.node.config.train_settings import Precision
from shoal.node.training.training_error import TrainingError

DTYPES: dict[Precision, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def check_precision(
    precision: Precision, device: torch.device, parameters: Iterable[Tensor] = ()
) -> None:
    """Raise TrainingError if ``device`` cannot compute in ``precision``, or not with these
    ``parameters``.
    """
    if precision not in DTYPES:
        return
    if not _computes(DTYPES[precision], device):
        others = "float32"
        if precision == "float16":
            others = "bfloat16 or float32"
        elif device.type == "cuda":
            others = "float16 or float32"
        raise TrainingError(
            f"The device {str(device)!r} cannot compute in {precision}: set train.precision to "
            f"{others}."
        )
    if precision == "float16" and any(p.dtype == torch.float16 for p in parameters):
        raise TrainingError(
            "The model has weights of float16, whose gradients cannot be scaled back: have the "
            "task make them float32, and leave train.precision at float16."
        )


def _computes(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a small layer can be trained in ``dtype``.

    A GPU that only imitates bfloat16 would be slower than float32.
    """
    if device.type == "cuda" and dtype == torch.bfloat16:
        with torch.cuda.device(device):
            if not torch.cuda.is_bf16_supported(including_emulation=False):
                return False
    try:
        with warnings.catch_warnings():
            # A device without this autocast only warns, and computes in float32.
            warnings.simplefilter("ignore", UserWarning)
            weight = torch.ones(8, 8, device=device, requires_grad=True)
            with torch.autocast(device.type, dtype=dtype):
                found = torch.nn.functional.linear(torch.ones(8, 8, device=device), weight)
            found.float().sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return found.dtype == dtype
