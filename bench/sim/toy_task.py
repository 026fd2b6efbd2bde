"""The task of ``python -m bench.sim``: a quadratic bowl with a known minimum, whose inner steps
cost next to nothing.

    loss(w) = 1/2 mean_j h_j (w_j - w*_j)^2

The curvatures h are spread evenly, by their logarithms, from 0.05 to 1. A peer sees the gradient
with noise, fresh in each step, and towards a minimum of its own: its data differ from the others'.
Alone it ends at its own minimum; the mean of many near w*.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

LAYERS = 8  # tensors that the parameters are in, so that methods can cut fragments
FLAT, STEEP = 0.05, 1.0  # curvatures
APART = 0.3  # standard deviation of a peer's own minimum around the common one, whose own is 1
NOISE = 1.0  # standard deviation of a gradient's noise
LR = 0.1  # of the inner SGD
BATCH = 16  # tokens that a step counts as


@dataclass(frozen=True)
class ToyTask:
    """The bowl: ``curvature`` and ``minimum``, float32 ``[parameters]``."""

    curvature: Tensor
    minimum: Tensor
    _after: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def after(self, steps: int) -> tuple[Tensor, Tensor]:
        """Return the share of the distance to a peer's minimum that is left after ``steps``, and
        the noise's standard deviation.

        A step is x <- (1 - lr h) x + lr * noise, so after k of them x_k = a^k x_0 + N(0, (lr
        noise)^2 (1 - a^2k) / (1 - a^2)).
        """
        if steps not in self._after:
            decay = 1 - LR * self.curvature.double()
            variance = (LR * NOISE) ** 2 * (1 - decay ** (2 * steps)) / (1 - decay**2)
            self._after[steps] = (decay**steps).float(), variance.sqrt().float()
        return self._after[steps]

    def loss(self, weights: Tensor) -> float:
        """Return the loss of flat weights, float32 ``[parameters]``."""
        return float((self.curvature * (weights - self.minimum).square()).mean() / 2)


def make_toy(parameters: int, seed: int) -> ToyTask:
    """Return the bowl of a random seed; ValueError below ``LAYERS`` parameters."""
    if parameters < LAYERS:
        raise ValueError(f"a toy model has at least {LAYERS} parameters, got {parameters}")
    generator = torch.Generator().manual_seed(seed)
    # In the order of a random permutation, so that all layers are alike.
    spread = torch.linspace(0, 1, parameters, device="cpu")[
        torch.randperm(parameters, generator=generator, device="cpu")
    ]
    return ToyTask(
        FLAT * (STEEP / FLAT) ** spread, torch.randn(parameters, generator=generator, device="cpu")
    )


class ToyModel(nn.Module):
    """A model with all weights 0, in ``LAYERS`` tensors of nearly equal size, which are views of
    ``flat``.
    """

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.flat = torch.zeros(parameters, device="cpu")
        self.layers = nn.ParameterList(
            [nn.Parameter(part) for part in self.flat.tensor_split(LAYERS)]
        )


class Lesson:
    """One peer's data and inner steps, which follow from ``seed`` and from how they are bundled."""

    def __init__(self, toy: ToyTask, model: ToyModel, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._toy, self._flat = toy, model.flat
        self._own = toy.minimum + APART * torch.randn(
            toy.minimum.shape, generator=self._generator, device="cpu"
        )
        self._noise = torch.empty_like(self._own)

    @torch.no_grad()
    def learn(self, steps: int) -> None:
        """Take ``steps`` steps of plain SGD at once: their outcome in a bowl has a known
        distribution, from which this draws.
        """
        decay, deviation = self._toy.after(steps)
        self._noise.normal_(generator=self._generator).mul_(deviation).add_(self._own)
        self._flat.sub_(self._own).mul_(decay).add_(self._noise)
