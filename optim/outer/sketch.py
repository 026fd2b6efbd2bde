"""Sketches: a few numbers by which two peers compare their weights without sending them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

NUMBERS = 4
WIDTH, CHUNK = 1024, 1 << 20
"""Values in a row and in a chunk. A chunk has few enough rows to sum them in float32."""


def sketch(tensors: Iterable[Tensor]) -> tuple[float, ...]:
    """Return the sums over every fourth value of each tensor, one for each of the four starting positions, in float64.

    It is linear, so the distance of two sketches is the norm of the sketch of the difference, which is about the norm of the
    difference if its values are independent. Two machines that round differently differ by about 1e-7 of the weights; two swarms
    that learnt from different data, by as much as they have moved.
    """
    return total(_sums(tensor) for tensor in tensors)


def total(rows: Iterable[Tensor]) -> tuple[float, ...]:
    """Return the sketch of several tensors from those of each, in their order."""
    sums = torch.zeros(NUMBERS, dtype=torch.float64)
    for row in rows:
        sums += row
    return tuple(sums.tolist())


def _sums(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    whole = flat.numel() // WIDTH * WIDTH
    mine = torch.zeros(NUMBERS, dtype=torch.float64, device=flat.device)
    for chunk in torch.split(flat[:whole], CHUNK):
        mine += chunk.view(-1, WIDTH).float().sum(0).view(-1, NUMBERS).sum(0, dtype=torch.float64)
    for place in range(NUMBERS):
        mine[place] += flat[whole + place :: NUMBERS].sum(dtype=torch.float64)
    return mine.cpu()


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the Euclidean distance of two sketches."""
    return math.dist(one, other)
