"""Slices of a list of tensors, aligned to the codecs' blocks, and shares of some of them.

    cuts = slices([(2048, 512), (512,)])         # the same for all peers of a model
    share = Share.of(cuts[::2])
    share.take(tensors)                          # one flat tensor of each that has values in it

Who has which slice: `shoal.optim.exchange.butterfly`.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.optim.codecs.base import Shape

BLOCK = 1024
"""Values. A piece begins at a multiple of it: all codecs that can be cut have blocks that divide
it.
"""
MOST_SLICES = 1024
"""Of one contribution: enough that shares hardly differ, few enough to be dealt at once."""


class Piece(NamedTuple):
    """Values ``start`` to ``stop`` of the flattened tensor number ``place``."""

    place: int
    start: int
    stop: int


def slices(shapes: Sequence[Shape]) -> list[list[Piece]]:
    """Cut tensors of these shapes into slices of about the same number of values, in order."""
    counts = [math.prod(shape) for shape in shapes]
    least = max(BLOCK, math.ceil(sum(counts) / MOST_SLICES))
    found: list[list[Piece]] = []
    current: list[Piece] = []
    size = 0
    for place, count in enumerate(counts):
        start = 0
        while start < count:
            missing = math.ceil((least - size) / BLOCK) * BLOCK
            stop = min(start + missing, count)
            current.append(Piece(place, start, stop))
            size += stop - start
            start = stop
            if size >= least:
                found.append(current)
                current = []
                size = 0
    if current:
        found.append(current)
    return found


@dataclass(frozen=True)
class Share:
    """Some slices of a list of tensors, as ranges of values of each tensor that they touch."""

    ranges: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    """(place of the tensor, its ranges), in order."""

    @classmethod
    def of(cls, cuts: Iterable[Sequence[Piece]]) -> Share:
        """Return the share of some slices, given in order."""
        ranges: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for place, start, stop in itertools.chain.from_iterable(cuts):
            before = ranges[place]
            if before and before[-1][1] == start:
                before[-1] = (before[-1][0], stop)
            else:
                before.append((start, stop))
        return cls(tuple((place, tuple(ranges[place])) for place in sorted(ranges)))

    @property
    def shapes(self) -> list[Shape]:
        """Those of what ``take`` returns."""
        return [(sum(stop - start for start, stop in ranges),) for _, ranges in self.ranges]

    def tensors_below(self, place: int) -> int:
        """Return how many tensors of ``take`` are of tensors before ``place``."""
        return sum(its_place < place for its_place, _ in self.ranges)

    def take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return copies of the values, one flat tensor of each tensor that has some here."""
        taken = []
        for place, ranges in self.ranges:
            flat = tensors[place].reshape(-1)
            taken.append(torch.cat([flat[start:stop] for start, stop in ranges]))
        return taken

    def put(self, tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Write what ``take`` would return into contiguous ``tensors``."""
        for (place, ranges), given in zip(self.ranges, values, strict=True):
            flat = tensors[place].view(-1)
            at = 0
            for start, stop in ranges:
                flat[start:stop] = given[at : at + stop - start]
                at += stop - start
