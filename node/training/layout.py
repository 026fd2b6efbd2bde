"""Where the model of a peer lies: in one process, or in those of several ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from shoal.node.inner_tensors import load_whole_model
from shoal.optim import OuterOptimizer
from shoal.optim.outer.weights import Processes


class Layout:
    """A model in one process.

    Those of several ranks override all of it, and every rank calls each method at the same point.
    """

    rank = 0
    ranks = 1
    group: Processes | None = None

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Move ``model`` to the device, and cut it in place if need be; return what the loss is
        computed with.
        """
        return model.to(device)

    def gathered_bytes(self, model: nn.Module) -> int:
        """Return the bytes of others' parts of ``model`` that are on this rank's device at most,
        while it computes.
        """
        return 0

    def backward_of(self, part: int, count: int) -> AbstractContextManager[Any]:
        """Return the context of the backward pass of the ``part``-th of ``count`` parts of a
        batch.
        """
        return nullcontext()

    def backward_done(self, count: int) -> None:
        """Have the gradients of ``count`` backward passes be the same on all ranks, if they are not
        yet.
        """

    def mean(self, loss: Tensor) -> Tensor:
        return loss

    def evaluated(self, work: Callable[[], float]) -> float:
        """Return what ``work`` returns on rank 0, which may take long; the value of other ranks is
        their own affair.
        """
        return work()

    # A whole state is rank 0's to get and to give; it may be the tensors of the model or optimizer
    # itself.

    def whole_model(self, model: nn.Module) -> dict[str, Tensor]:
        return model.state_dict()

    def load_model(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        """Raise ValueError if the model does not hold what ``state`` says afterwards."""
        load_whole_model(model, state)

    def whole_outer(self, opt: OuterOptimizer) -> dict[str, Any]:
        return opt.whole_state(copy=False)

    def load_outer(self, opt: OuterOptimizer, state: dict[str, Any]) -> None:
        """Raise ValueError if ``state`` does not fit; nothing is changed then."""
        opt.load_state_dict(state)

    def agreed(self, value: Any) -> Any:
        """Return rank 0's value."""
        return value

    def gathered(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order, on rank 0."""
        return [value]
