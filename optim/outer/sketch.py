"""A few numbers by which two peers compare their weights without sending them.

    math.dist(sketch(mine), sketch(theirs))            # 0 only if the weights are the same
    math.dist(projection(mine), projection(theirs))    # about the distance of the weights

Both are linear: the difference of two peers' numbers is that of the difference of their weights.
Which one is used where: docs/internals.md, "Two sketches".
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Iterable

import torch
from torch import Tensor

from shoal.optim.device import to_host

NUMBERS = 4
"""Sums in a ``sketch``: one for each starting position."""
WIDTH = 1024
"""Values in a row; a multiple of NUMBERS."""
CHUNK = 1 << 20
"""Values in a chunk, which has few enough rows to sum them in float32."""
PROJECTED = 16
"""Sums in a ``projection``: the relative error of a distance is 1 / sqrt(2 PROJECTED), 18 %."""
BLOCK = 1 << 16
"""Values for which there are signs; the next block has the same ones, some of its sums turned."""


def sketch(tensors: Iterable[Tensor]) -> tuple[float, ...]:
    """Return the sums over every fourth value of each tensor, one for each of the four starting
    positions, in float64.

    Two machines that round differently differ by about 1e-7 of the weights; two swarms that learnt
    from different data, by as much as they have moved.
    """
    return total(sketches(tensors))


def total(rows: Iterable[Tensor]) -> tuple[float, ...]:
    """Return the sketch of several tensors from those of each, in their order."""
    sums = torch.zeros(NUMBERS, dtype=torch.float64, device="cpu")
    for row in rows:
        sums += row
    return tuple(sums.tolist())


def sketches(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the sums of each tensor, (4,) float64 on the CPU.

    A device is waited for once; it need not have float64.
    """
    chunks: list[list[Tensor]] = []
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        whole = flat.numel() // WIDTH * WIDTH
        rows = [chunk.view(-1, WIDTH).float().sum(0) for chunk in torch.split(flat[:whole], CHUNK)]
        chunks.append([*rows, flat[whole:]])
    read = iter(to_host(list(itertools.chain.from_iterable(chunks))))
    found: list[Tensor] = []
    for pieces in chunks:
        mine = torch.zeros(NUMBERS, dtype=torch.float64, device="cpu")
        for _ in pieces[:-1]:
            mine += next(read).view(-1, NUMBERS).sum(0, dtype=torch.float64)
        rest = next(read)
        for place in range(NUMBERS):
            mine[place] += rest[place::NUMBERS].sum(dtype=torch.float64)
        found.append(mine)
    return found


def projection(tensors: Iterable[Tensor]) -> tuple[float, ...]:
    """Return PROJECTED sums of all values, each with a random sign, and then the norm.

    The signs are the same on every peer.
    """
    found: list[Tensor] = []
    # One for all blocks: small results between fresh pieces would keep malloc from joining them,
    # and it would take more each time.
    rooms: dict[torch.device, Tensor] = {}
    for tensor in tensors:
        for block in torch.split(tensor.detach().reshape(-1), BLOCK):
            values = block.float()
            signs = _signs(block.device)
            if block.device not in rooms:
                rooms[block.device] = torch.empty_like(signs)
            room = rooms[block.device]
            squares = torch.mul(values, values, out=room[: block.numel()]).sum()
            torch.mul(values, signs[: block.numel()], out=room[: block.numel()])
            padded = room[: -(-block.numel() // PROJECTED) * PROJECTED]
            padded[block.numel() :].zero_()
            found += [padded.view(-1, PROJECTED).sum(0), squares]
    read = to_host(found)
    sums = torch.zeros(PROJECTED, dtype=torch.float64, device="cpu")
    square = 0.0
    for number, (row, squares) in enumerate(zip(read[::2], read[1::2], strict=True)):
        sums += row.double() * _turns(number)
        square += squares.item()
    return (*sums.tolist(), math.sqrt(square))


@functools.cache
def _signs(device: torch.device) -> Tensor:
    """Return +1 or -1 for each value of a block."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 2, (BLOCK,), generator=generator, device="cpu")
    return (bits.float() * 2 - 1).to(device)


def _turns(number: int) -> Tensor:
    """Return a sign for each sum of the block of this number, so that no two blocks are alike."""
    drawn = random.Random(number).getrandbits(PROJECTED)
    signs = [1.0 if drawn >> bit & 1 else -1.0 for bit in range(PROJECTED)]
    return torch.tensor(signs, dtype=torch.float64, device="cpu")
