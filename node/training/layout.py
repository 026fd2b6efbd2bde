"""How a model lies on this node's devices: whole in one process, which is the default, or in several (`shoal.node.parallel`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from shoal.optim import OuterOptimizer


class Layout:
    """A model in one process. Those of several ranks override all of it, and every rank calls each method at the same point."""

    rank = 0
    ranks = 1

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Move ``model`` to the device, and cut it in place if need be; return what the loss is computed with."""
        return model.to(device)

    def unsynchronised(self) -> AbstractContextManager[Any]:
        """Return the context of a backward pass whose gradients need not be the same on all ranks yet."""
        return nullcontext()

    def mean(self, loss: Tensor) -> Tensor:
        """Return the mean of the ranks' losses."""
        return loss

    def outer_options(self) -> dict[str, Any]:
        """Return further arguments of the outer optimizer."""
        return {}

    def evaluated(self, work: Callable[[], float]) -> float:
        """Return what ``work`` returns on rank 0, which may take long; the value of other ranks is their own affair."""
        return work()

    def whole_model(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the model's whole state, on rank 0; it may be the model's own tensors."""
        return model.state_dict()

    def load_model(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        """Load the whole state that rank 0 gives."""
        model.load_state_dict(state)

    def whole_outer(self, opt: OuterOptimizer) -> dict[str, Any]:
        """Return the outer optimizer's whole state, on rank 0; it may be the optimizer's own tensors."""
        return opt.whole_state(copy=False)

    def load_outer(self, opt: OuterOptimizer, state: dict[str, Any]) -> None:
        """Load the whole state that rank 0 gives. ValueError if it does not fit; nothing is changed then."""
        opt.load_state_dict(state)

    def agreed(self, value: Any) -> Any:
        """Return rank 0's value."""
        return value

    def gathered(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order, on rank 0."""
        return [value]
