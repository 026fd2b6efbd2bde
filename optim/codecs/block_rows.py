"""Tensors as rows of a block each, some blocks at a time."""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.optim.codecs.quantized import blocks
from shoal.optim.device import to_host

BLOCK = 64
"""Values that have a range together."""
SLAB = 512
"""Blocks at a time, whose intermediate results stay in the cache; also the period of the dither."""


class Rows:
    """Tensors as blocks of float32 values on the CPU, which are copied only where a slab is not all
    of one such tensor.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = to_host([tensor.detach() for tensor in tensors])
        self._flat = [tensor.reshape(-1) for tensor in self._tensors]
        self.counts = [blocks(tensor.numel(), BLOCK) for tensor in self._flat]
        self._ends = list(itertools.accumulate(self.counts))
        self.sizes = torch.full((len(self),), float(BLOCK), device="cpu")
        """Values in each block, float32."""
        self.short = set[int]()
        """The slabs in which a block is not full."""
        for end, flat in zip(self._ends, self._flat, strict=True):
            if flat.numel() % BLOCK:
                self.sizes[end - 1] = flat.numel() % BLOCK
                self.short.add((end - 1) // SLAB)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def tensors(self) -> list[Tensor]:
        return [tensor.float() for tensor in self._tensors]

    @functools.cached_property
    def largest(self) -> Tensor:
        """The largest magnitude of each block."""
        largest = torch.empty(len(self), device="cpu")
        room = torch.empty(min(len(self), SLAB), BLOCK, device="cpu")
        for part, found in together(self.slabs(), largest):
            torch.amax(torch.abs(part, out=room[: len(part)]), dim=1, out=found)
        return largest

    def slabs(self) -> Iterator[Tensor]:
        """Yield (blocks, 64) of a slab after the other, short blocks filled with zeros; some in
        memory that the next overwrites.
        """
        room = torch.empty(min(len(self), SLAB), BLOCK, device="cpu")
        for first in range(0, len(self), SLAB):
            size = (min(first + SLAB, len(self)) - first) * BLOCK
            place = bisect_right(self._ends, first)
            begin = (first - self._ends[place] + self.counts[place]) * BLOCK
            part = self._flat[place][begin : begin + size]
            if part.numel() == size and part.dtype == torch.float32:
                yield part.view(-1, BLOCK)
            else:
                filled = room.view(-1)[:size].zero_()
                self._fill(filled, place, begin)
                yield filled.view(-1, BLOCK)

    def _fill(self, slab: Tensor, place: int, begin: int) -> None:
        """Write values into a flat slab, from those of the tensor ``place`` at ``begin`` on."""
        at = 0
        while at < slab.numel():
            part = self._flat[place][begin : begin + slab.numel() - at]
            slab[at : at + part.numel()] = part
            at += blocks(part.numel(), BLOCK) * BLOCK
            place += 1
            begin = 0


def together(*parts: Tensor | Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield from all at once; of tensors, which have a row for each block, a slab after the
    other.
    """
    slabs: list[Iterable[Any]] = []
    for part in parts:
        if isinstance(part, Tensor):
            slabs.append(torch.split(part, SLAB) if len(part) else ())
        else:
            slabs.append(part)
    return zip(*slabs, strict=True)


def rms_of(rows: Rows) -> Tensor:
    """Return the root of the mean square of each block; zeros fill a short one up."""
    norms = torch.empty(len(rows), device="cpu")
    for part, found in together(rows.slabs(), norms):
        torch.linalg.vector_norm(part, dim=1, out=found)
    return norms.div_(rows.sizes.sqrt())
