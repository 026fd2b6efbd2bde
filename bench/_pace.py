"""A model whose computing is a timed wait, as on a machine with a GPU, where the processor is idle meanwhile.

A step takes ``seconds`` from its beginning: three tenths for the forward pass, six for the backward pass, layer by layer, so that
who sends gradients while later ones are still computed (DDP) can; the last tenth is the inner optimizer's, whose end waits for the
end of the step. All else, copies and outer steps and waiting for the network, comes on top and counts as waiting.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

FORWARD, BACKWARD = 0.3, 0.6  # shares of a step


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
    """``width`` x ``width`` weights that get a gradient of that size."""

    def __init__(self, width: int, pace: Pace, there: float, back: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) * 0.02)
        self.pace, self.there, self.back = pace, there, back

    def forward(self, x: Tensor) -> Tensor:
        done: Tensor = _Work.apply(x + self.weight[0, 0], self.pace, self.there, self.back)  # type: ignore[no-untyped-call]
        return done


class PacedModel(nn.Module):
    """``layers`` layers; all nodes make the same weights."""

    def __init__(self, layers: int, width: int, pace: Pace) -> None:
        super().__init__()
        torch.manual_seed(0)
        part = FORWARD / layers, BACKWARD / layers
        self.layers = nn.ModuleList(
            Layer(width, pace, (number + 1) * part[0], FORWARD + (layers - number) * part[1]) for number in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()
