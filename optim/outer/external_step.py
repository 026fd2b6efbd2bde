"""A stand-in for an inner optimizer that a library steps itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch.optim.optimizer import ParamsT


class Stepped(torch.optim.Optimizer):
    """Optimizer whose ``step`` does nothing: wrapped in an outer optimizer, whose ``step`` then does the outer part alone.

    For training loops in which a library steps the inner optimizer. Call the outer optimizer's ``step`` after each inner one.
    ``defaults``: settings of the parameter groups, if there are any. ValueError without parameters.
    """

    def __init__(self, params: ParamsT, defaults: dict[str, Any] | None = None) -> None:
        super().__init__(params, defaults or {})

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do nothing but call ``closure``: what this optimizer stands for is stepped elsewhere."""
        return None if closure is None else closure()
