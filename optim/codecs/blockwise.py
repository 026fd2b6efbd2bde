"""Base of the block-wise codecs: each tensor has its own section of the payload and is processed in slabs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shoal.optim.codecs.base import Checks, Shape, Stateless, check_payload

CPU_SLAB, GPU_SLAB = 2**18, 2**26
"""Values processed at once: on a CPU the intermediate results stay in the cache, on a GPU the launches are few."""


class SectionCodec(Stateless, ABC):
    """Stateless codec that encodes each tensor separately. Sections begin at multiples of 4 bytes; gaps are zero."""

    name: str
    displacement = True

    @abstractmethod
    def section(self, shape: Shape) -> int:
        """Return the bytes that a tensor of this shape needs, without the gap."""

    @abstractmethod
    def write(self, tensor: Tensor, section: Tensor, checks: Checks) -> None:
        """Encode one float32 tensor into ``section``, a zeroed uint8 tensor on the same device. ``checks``: as for ``encode``."""

    @abstractmethod
    def read(self, section: Tensor, shape: Shape, checks: Checks) -> Tensor:
        """Decode one tensor. ``checks``: as for ``decode``."""

    def _room(self, shape: Shape) -> int:
        return (self.section(shape) + 3) // 4 * 4

    def nbytes(self, shapes: Sequence[Shape]) -> int:
        return sum(self._room(shape) for shape in shapes)

    def encode(self, tensors: Sequence[Tensor]) -> Tensor:
        """Encode on the device of the tensors; only the payload is copied from a GPU."""
        checks = Checks()
        return checks.read(self.packed(tensors, checks))

    def packed(self, tensors: Sequence[Tensor], checks: Checks) -> Tensor:
        """Encode, on the device of the tensors."""
        shapes = [tuple(tensor.shape) for tensor in tensors]
        devices = {tensor.device for tensor in tensors}
        payload = Checks.payload(self.nbytes(shapes), devices.pop() if len(devices) == 1 else "cpu")
        offset = 0
        with torch.no_grad():
            for tensor, shape in zip(tensors, shapes, strict=True):
                section = payload[offset : offset + self.section(shape)]
                self.write(tensor.detach().to(payload.device, torch.float32), section, checks)
                offset += self._room(shape)
        return payload

    def decode(self, payload: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        return self.unpacked(payload, shapes, Checks(later=False))

    def unpacked(self, payload: Tensor, shapes: Sequence[Shape], checks: Checks) -> list[Tensor]:
        """Decode into fresh tensors, on the payload's device."""
        payload = check_payload(payload, self.nbytes(shapes), self.name)
        tensors, offset = [], 0
        with torch.no_grad():
            for shape in shapes:
                tensors.append(self.read(payload[offset : offset + self.section(shape)], shape, checks))
                offset += self._room(shape)
        return tensors


def blocks(count: int, size: int) -> int:
    """Return the number of blocks of ``size`` values that hold ``count`` values; the last may be shorter."""
    return (count + size - 1) // size


def slabs(flat: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    """Yield views of a flat tensor as matrices of whole blocks, with the number of their first block; a short last block alone."""
    whole = flat.numel() // size
    step = max((CPU_SLAB if flat.device.type == "cpu" else GPU_SLAB) // size, 1)
    for first in range(0, whole, step):
        end = min(first + step, whole)
        yield first, flat[first * size : end * size].view(end - first, size)
    if flat.numel() > whole * size:
        yield whole, flat[whole * size :].view(1, -1)


def check_sent(scales: Tensor, checks: Checks) -> None:
    text = "a tensor to be sent holds NaN, infinity or values too large: lower the learning rate or clip gradients"
    checks.require(scales.isfinite().all(), text)


def check_received(scales: Tensor, checks: Checks) -> None:
    checks.require(((scales >= 0) & scales.isfinite()).all(), "the payload has a scale that is negative, infinite or no number")


def numel(shape: Shape) -> int:
    return math.prod(shape)
