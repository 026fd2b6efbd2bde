"""Tensors that are computed when they are needed.

    sent = differences(fast, slow)               # an ``OnDemand``
    for place, start, stop in slabs(sent):
        sent.values(place, start, stop)          # flat float32 values on the CPU

So a contribution takes no memory of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import torch
from torch import Tensor

SLAB_VALUES = 1 << 18
"""Values that are computed at a time: 1 MB of float32, which stays in the cache."""
Item = Tensor | tuple[Tensor, Tensor]
"""A tensor, or two that stand for their difference, the first less the second."""


class OnDemand(Sequence[Tensor]):
    """Sequence of tensors that nobody may change: some are those handed in, others the difference
    of two, computed when taken.

    So a contribution need not be held in memory. The tensors handed in must stay as they are while
    this is in use.

    Args:
        items: what it is made of.
        through: dtype to which they are rounded, as if they had travelled in it, and then float32;
            None: they are as they are.
    """

    def __init__(self, items: Sequence[Item], through: torch.dtype | None = None) -> None:
        self._items = list(items)
        self._through = through

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        wholes = [item if isinstance(item, Tensor) else item[0] for item in self._items]
        return [tuple(whole.shape) for whole in wholes]

    @property
    def on_cpu(self) -> bool:
        """True if all are in main memory."""
        for item in self._items:
            tensors = [item] if isinstance(item, Tensor) else item
            if any(tensor.device.type != "cpu" for tensor in tensors):
                return False
        return True

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
        return whole if self._through is None else whole.to(self._through).float()

    def rounded(self, through: torch.dtype) -> OnDemand:
        """Return the same as float32 values that have travelled in ``through``."""
        return OnDemand(
            [item.float() if isinstance(item, Tensor) else item for item in self._items], through
        )

    def joined(self, tensors: Sequence[Tensor]) -> OnDemand:
        """Return the same with ``tensors`` at its end."""
        return OnDemand([*self._items, *tensors], self._through)

    @torch.no_grad()
    def values(self, place: int, start: int, stop: int) -> Tensor:
        """Return the values from ``start`` to ``stop`` of one tensor, flat, float32, on the CPU;
        maybe a view of it.
        """
        item = self._items[place]
        if isinstance(item, Tensor):
            part = item.detach().reshape(-1)[start:stop].to("cpu", torch.float32)
        else:
            first, second = (whole.detach().reshape(-1)[start:stop] for whole in item)
            part = torch.sub(first, second).to("cpu", torch.float32)
        return part if self._through is None else part.to(self._through).float()


def differences(first: Sequence[Tensor], second: Sequence[Tensor]) -> OnDemand:
    return OnDemand(list(zip(first, second, strict=True)))


def slabs(tensors: OnDemand) -> Iterator[tuple[int, int, int]]:
    """Return (place, start, stop) of pieces of at most ``SLAB_VALUES`` values that together are all
    tensors, in order.
    """
    for place, shape in enumerate(tensors.shapes):
        size = torch.Size(shape).numel()
        for start in range(0, size, SLAB_VALUES):
            yield place, start, min(start + SLAB_VALUES, size)


def held_at_once(tensors: Iterable[Tensor]) -> Sequence[Tensor]:
    """Return all of ``tensors``; those that are computed on demand still are."""
    return tensors if isinstance(tensors, OnDemand) else list(tensors)
