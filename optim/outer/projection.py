"""Random projections: a few numbers of each peer that tell how far apart the peers' weights are, without sending any weight.

`shoal.optim.outer.sketch` is made to find any difference at all; its sums are far from the norm where values have a mean, as the
gains of a norm layer do. Here random signs take the mean out, so norms and distances are right on average.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterable

import torch
from torch import Tensor

NUMBERS = 16  # the relative error of a distance of two peers is about 1 / sqrt(2 NUMBERS), 18 %
BLOCK = 1 << 16  # values for which there are signs; the blocks after it have the same ones, some of the sums turned


def projection(tensors: Iterable[Tensor]) -> tuple[float, ...]:
    """Return `NUMBERS` sums of the values of ``tensors``, each value with a random sign, alike on every peer; and then the norm.

    The sums are linear, so the norm of the difference of two peers' sums estimates that of the difference of their weights.
    """
    sums, square, number = torch.zeros(NUMBERS, dtype=torch.float64), 0.0, 0
    for tensor in tensors:
        for block in torch.split(tensor.detach().reshape(-1), BLOCK):
            values = block.float()
            signed = values * _signs()[: block.numel()].to(block.device)
            padded = torch.nn.functional.pad(signed, (0, -block.numel() % NUMBERS))
            sums += padded.view(-1, NUMBERS).sum(0).double().cpu() * _turns(number)
            square += values.square().sum().item()
            number += 1
    return (*sums.tolist(), math.sqrt(square))


@functools.cache
def _signs() -> Tensor:
    return torch.randint(0, 2, (BLOCK,), generator=torch.Generator().manual_seed(0)).float() * 2 - 1


def _turns(number: int) -> Tensor:
    """Return for the block of this number a sign for each sum, so that two blocks do not have the same signs."""
    drawn = random.Random(number).getrandbits(NUMBERS)
    return torch.tensor([1.0 if drawn >> bit & 1 else -1.0 for bit in range(NUMBERS)], dtype=torch.float64)
