"""An optimizer whose steps somebody else takes: for training loops that keep their inner optimizer to themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch


class Stepped(torch.optim.Optimizer):
    """In place of the inner optimizer where a library steps that one: wrapped, ``step`` does the outer part alone.

    Call the outer optimizer's ``step`` after each inner one. ValueError without parameters.
    """

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        super().__init__(params, {})

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Nothing; the inner step is done already."""
        return None if closure is None else closure()
