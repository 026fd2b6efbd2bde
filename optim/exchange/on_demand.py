"""Tensors that are computed when they are taken, and read piece by piece, so that a contribution need not be held in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import torch
from torch import Tensor

SLAB = 1 << 18  # values that are computed at a time

Item = Tensor | tuple[Tensor, Tensor]
"""A tensor, or two that stand for their difference, the first less the second."""


class OnDemand(Sequence[Tensor]):
    """Sequence of tensors that nobody may change: some are those handed in, others the difference of two, computed when taken.

    The tensors handed in must stay as they are while this is in use.

    Args:
        items: what it is made of.
        through: dtype to which ``values`` are rounded, as if they had travelled in it.
    """

    def __init__(self, items: Sequence[Item], through: torch.dtype = torch.float32) -> None:
        self._items, self._through = list(items), through

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(item.shape if isinstance(item, Tensor) else item[0].shape) for item in self._items]

    @property
    def on_cpu(self) -> bool:
        """True if all are in main memory."""
        every = (item for item in self._items for item in ([item] if isinstance(item, Tensor) else item))
        return all(tensor.device.type == "cpu" for tensor in every)

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, place: int) -> Tensor: ...
    @overload
    def __getitem__(self, place: slice) -> OnDemand: ...
    def __getitem__(self, place: int | slice) -> Tensor | OnDemand:
        if isinstance(place, slice):
            return OnDemand(self._items[place], self._through)
        item = self._items[place]
        whole = item if isinstance(item, Tensor) else item[0] - item[1]
        return whole if self._through == torch.float32 else whole.to(self._through).float()

    def rounded(self, through: torch.dtype) -> OnDemand:
        """Return the same as float32 values that have travelled in ``through``."""
        return OnDemand([item.float() if isinstance(item, Tensor) else item for item in self._items], through)

    def joined(self, tensors: Sequence[Tensor]) -> OnDemand:
        """Return the same with ``tensors`` at its end."""
        return OnDemand([*self._items, *tensors], self._through)

    @torch.no_grad()
    def values(self, place: int, start: int, stop: int) -> Tensor:
        """Return the values from ``start`` to ``stop`` of one tensor, flat, float32, on the CPU; maybe a view of it."""
        item = self._items[place]
        if isinstance(item, Tensor):
            part = item.detach().reshape(-1)[start:stop].to("cpu", torch.float32)
        else:
            part = torch.sub(*(whole.detach().reshape(-1)[start:stop] for whole in item)).to("cpu", torch.float32)
        return part if self._through == torch.float32 else part.to(self._through).float()


def differences(first: Sequence[Tensor], second: Sequence[Tensor]) -> OnDemand:
    return OnDemand(list(zip(first, second, strict=True)))


def slabs(tensors: OnDemand) -> Iterator[tuple[int, int, int]]:
    """Return (place, start, stop) of pieces of at most ``SLAB`` values that together are all tensors, in order."""
    for place, shape in enumerate(tensors.shapes):
        size = torch.Size(shape).numel()
        for start in range(0, size, SLAB):
            yield place, start, min(start + SLAB, size)


def held_at_once(tensors: Iterable[Tensor]) -> Sequence[Tensor]:
    """Return all of ``tensors``; those that are computed on demand still are."""
    return tensors if isinstance(tensors, OnDemand) else list(tensors)
