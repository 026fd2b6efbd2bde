"""Muon for matrices of which each process has a part (FSDP2, tensor parallel): torch's own steps, each on a whole matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor

from shoal.optim.outer.fsdp import local
from shoal.optim.ranks.weights import cut_like

OPTIONS = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
"""Muon's own settings: a group has more of them once an outer optimizer wraps it, or it was loaded."""


class WholeMuon(torch.optim.Muon):
    """``torch.optim.Muon`` whose step gathers one matrix at a time, so that it has the bits of one process, however it is cut.

    Torch's own would orthogonalise across processes, in bfloat16 sums of another order and with messages in every product. Each
    process computes the whole step, and keeps its part of weight and momentum; besides it holds one whole matrix, three times. All
    processes call ``step`` at the same time, with the same gradients set.
    """

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take a step of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            options = {name: group[name] for name in OPTIONS}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_of(parameter, options)
        return loss

    def _step_of(self, parameter: Tensor, options: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)  # type: ignore[arg-type]
        momentum, whole = state["momentum_buffer"], torch.nn.Parameter(_whole(parameter))
        whole.grad = _whole(parameter.grad)
        once = torch.optim.Muon([whole], **options)
        once.state[whole]["momentum_buffer"] = _whole(momentum)
        once.step()  # type: ignore[no-untyped-call]
        for mine, moved in ((parameter, whole.detach()), (momentum, once.state[whole]["momentum_buffer"])):
            local(mine).copy_(local(cut_like(moved, mine)))


def _whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach().clone()
