"""A stand-in for an inner optimizer that a library steps itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch


class Stepped(torch.optim.Optimizer):
    """Optimizer whose ``step`` does nothing: wrapped in an outer optimizer, whose ``step`` then does the outer part alone.

    For training loops in which a library steps the inner optimizer. Call the outer optimizer's ``step`` after each inner one.
    ValueError without parameters.
    """

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        super().__init__(params, {})

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do nothing but call ``closure``: the inner step is done already."""
        return None if closure is None else closure()
