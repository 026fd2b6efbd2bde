"""Sketches: a few numbers by which two peers compare their weights without sending them.

``sketch`` is made to find any difference at all; its sums are far from the norm where values have a mean, as the gains of a norm
layer do. In ``projection`` random signs take the mean out, so that norms and distances are right on average.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shoal.optim.device import to_host

NUMBERS = 4
PROJECTED = 16  # the relative error of a distance of two peers is about 1 / sqrt(2 PROJECTED), 18 %
BLOCK = 1 << 16  # values for which there are signs; the blocks after it have the same ones, some of the sums turned
WIDTH, CHUNK = 1024, 1 << 20
"""Values in a row and in a chunk. A chunk has few enough rows to sum them in float32."""


def sketch(tensors: Iterable[Tensor]) -> tuple[float, ...]:
    """Return the sums over every fourth value of each tensor, one for each of the four starting positions, in float64.

    It is linear, so the distance of two sketches is the norm of the sketch of the difference, which is about the norm of the
    difference if its values are independent. Two machines that round differently differ by about 1e-7 of the weights; two swarms
    that learnt from different data, by as much as they have moved.
    """
    return total(sketches(tensors))


def total(rows: Iterable[Tensor]) -> tuple[float, ...]:
    """Return the sketch of several tensors from those of each, in their order."""
    sums = torch.zeros(NUMBERS, dtype=torch.float64, device="cpu")
    for row in rows:
        sums += row
    return tuple(sums.tolist())


def sketches(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the sums of each tensor, (4,) float64 on the CPU. A device is waited for once; it need not have float64."""
    chunks: list[list[Tensor]] = []
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        whole = flat.numel() // WIDTH * WIDTH
        rows = [chunk.view(-1, WIDTH).float().sum(0) for chunk in torch.split(flat[:whole], CHUNK)]
        chunks.append([*rows, flat[whole:]])
    read = iter(to_host([piece for pieces in chunks for piece in pieces]))
    found = []
    for pieces in chunks:
        mine = torch.zeros(NUMBERS, dtype=torch.float64, device="cpu")
        for _ in pieces[:-1]:
            mine += next(read).view(-1, NUMBERS).sum(0, dtype=torch.float64)
        rest = next(read)
        for place in range(NUMBERS):
            mine[place] += rest[place::NUMBERS].sum(dtype=torch.float64)
        found.append(mine)
    return found


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the Euclidean distance of two sketches."""
    return math.dist(one, other)


def projection(tensors: Iterable[Tensor]) -> tuple[float, ...]:
    """Return `PROJECTED` sums of the values of ``tensors``, each value with a random sign, alike on every peer; and then the norm.

    The sums are linear, so the norm of the difference of two peers' sums estimates that of the difference of their weights.
    """
    found: list[Tensor] = []
    for tensor in tensors:
        for block in torch.split(tensor.detach().reshape(-1), BLOCK):
            values = block.float()
            signed = values * _signs(block.device)[: block.numel()]
            padded = torch.nn.functional.pad(signed, (0, -block.numel() % PROJECTED))
            found += [padded.view(-1, PROJECTED).sum(0), values.square().sum()]
    read = to_host(found)
    sums, square = torch.zeros(PROJECTED, dtype=torch.float64, device="cpu"), 0.0
    for number, (row, squares) in enumerate(zip(read[::2], read[1::2], strict=True)):
        sums += row.double() * _turns(number)
        square += squares.item()
    return (*sums.tolist(), math.sqrt(square))


@functools.cache
def _signs(device: torch.device) -> Tensor:
    signs = torch.randint(0, 2, (BLOCK,), generator=torch.Generator().manual_seed(0), device="cpu").float() * 2 - 1
    return signs.to(device)


def _turns(number: int) -> Tensor:
    """Return for the block of this number a sign for each sum, so that two blocks do not have the same signs."""
    drawn = random.Random(number).getrandbits(PROJECTED)
    return torch.tensor([1.0 if drawn >> bit & 1 else -1.0 for bit in range(PROJECTED)], dtype=torch.float64, device="cpu")
