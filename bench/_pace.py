"""A model whose computing is a timed wait, as on a machine with a GPU, where the processor is idle
meanwhile.

A step takes ``seconds`` from its beginning: a third for the forward pass, the rest for the backward
pass, layer by layer, so that who sends gradients while later ones are still computed (DDP) can. The
inner optimizer is part of it. All else, copies and outer steps and waiting for the network, comes
on top and counts as waiting.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

FORWARD, BACKWARD = (
    0.33,
    0.66,
)  # shares of a step; the rest is for what is real of the inner optimizer


class Pace:
    """The clock of one inner step."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._began = 0.0

    def begin(self) -> None:
        self._began = time.monotonic()

    def until(self, share: float) -> None:
        """Wait until ``share`` of the step is over; not at all if it already is."""
        time.sleep(max(self._began + share * self.seconds - time.monotonic(), 0.0))


class _Work(torch.autograd.Function):
    """Does nothing to its input, and takes its time both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pace: Pace, there: float, back: float) -> Tensor:
        ctx.pace, ctx.back = pace, back
        pace.until(there)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.pace.until(ctx.back)
        return grads[0], None, None, None


class Layer(nn.Module):
    """``width`` x ``width`` weights; with ``gradients`` they get a real gradient of that size, else
    none.
    """

    def __init__(self, width: int, pace: Pace, there: float, back: float, gradients: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) * 0.02)
        self.pace, self.there, self.back, self.gradients = pace, there, back, gradients

    def forward(self, x: Tensor) -> Tensor:
        if self.gradients:
            x = x + self.weight[0, 0]
        done: Tensor = _Work.apply(x, self.pace, self.there, self.back)  # type: ignore[no-untyped-call]
        return done


class PacedModel(nn.Module):
    """``layers`` layers; all nodes make the same weights."""

    def __init__(self, layers: int, width: int, pace: Pace, gradients: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        there, back = FORWARD / layers, BACKWARD / layers
        self.layers = nn.ModuleList(
            Layer(width, pace, (number + 1) * there, FORWARD + (layers - number) * back, gradients)
            for number in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()
