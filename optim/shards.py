"""Parameters of which this process holds only a part (FSDP2, tensor parallel): its part is all that the outer optimizer knows."""

from __future__ import annotations

import torch
from torch import Tensor


def local(param: Tensor) -> Tensor:
    """The part of ``param`` that is in this process, sharing its memory; ``param`` itself if it is whole.

    Ask each time: FSDP2 may move it. (By its method, because the name and place of DTensor depend on torch's version.)
    """
    if not hasattr(param, "to_local"):
        return param
    with torch.no_grad():
        part: Tensor = param.to_local()
        return part
