"""What saving and loading an outer optimizer needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from optim.codec import Codec


@runtime_checkable
class Stateful(Protocol):
    """A codec that may have a memory."""

    def fresh(self) -> Codec:
        """The same codec with an empty memory."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The memory, as copies."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore it."""
        ...


@runtime_checkable
class Rejectable(Protocol):
    """A codec with error feedback."""

    def rejected(self) -> None:
        """The last encoded contribution reached nobody: take it back into the memory."""
        ...


def fresh(codec: Codec) -> Codec:
    """The same codec with an empty memory, for another fragment or a new start; itself if it has none."""
    return codec.fresh() if isinstance(codec, Stateful) else codec


def check_shapes(what: str, theirs: Sequence[Tensor], mine: Sequence[Tensor]) -> None:
    """ValueError, naming the first difference."""
    if len(theirs) != len(mine):
        raise ValueError(f"{what} has {len(theirs)} tensors, this model has {len(mine)}")
    for index, (their, own) in enumerate(zip(theirs, mine, strict=True)):
        if their.shape != own.shape:
            raise ValueError(f"{what} has shape {tuple(their.shape)} at tensor {index}, this model has {tuple(own.shape)}")


@torch.no_grad()
def in_place(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """Copy their values into mine, wherever they live."""
    for own, their in zip(mine, theirs, strict=True):
        own.copy_(their)
