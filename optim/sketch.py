"""A few numbers that tell whether two peers hold about the same weights, without sending them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch import Tensor

NUMBERS = 4


def sketch(tensors: Iterable[Tensor]) -> tuple[float, ...]:
    """Sums over every fourth value of each tensor, one for each of the four places to begin; finite for finite weights.

    Linear, so the distance of two sketches is the length of the sketch of the difference, which is about that of the difference if
    its values are independent. Two machines that round differently differ by about 1e-7 of the weights; two swarms that learnt from
    different data, by as much as they have moved.
    """
    sums = [0.0] * NUMBERS
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        for place in range(NUMBERS):
            sums[place] += float(flat[place::NUMBERS].double().sum())
    return tuple(sums)


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Euclidean."""
    return math.dist(one, other)
