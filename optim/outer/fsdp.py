"""Access to sharded parameters (FSDP2, tensor parallel): the outer optimizer works on the local part only."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def local(param: Tensor) -> Tensor:
    """Return the part of ``param`` in this process, sharing its memory; ``param`` itself if it is not sharded.

    Call it each time: FSDP2 may move the part. (A DTensor is recognised by its method: its module depends on torch's version.)
    """
    if not hasattr(param, "to_local"):
        return param
    with torch.no_grad():
        part: Tensor = param.to_local()
        return part


def check_whole(params: Iterable[Tensor], model: nn.Module | None) -> None:
    """Raise ValueError if there are shards and no ``model`` to call ``reshard`` with."""
    if model is None and any(hasattr(param, "to_local") for param in params):
        raise ValueError("the parameters are cut into shards: hand in model=, or FSDP2 goes on with copies of weights that changed")


def reshard(model: nn.Module | None) -> None:
    """Make FSDP2 gather the weights again in the next forward pass; it may hold whole copies from the last one."""
    for module in model.modules() if model is not None else ():
        again = getattr(module, "reshard", None)
        if callable(again):
            again()
