"""Codecs that send every value, in 8 bits or 1, with one scale for each block of a tensor's values.

    INT8.encode(tensors)      # 1 + 1/64 bytes a value
    SIGN.encode(tensors)      # 1/8 + 1/256 bytes a value

For a payload's layout see ``DenseCodec``.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shoal.optim.codecs.base import Shape, Stateless, check_payload, padded
from shoal.optim.codecs.bits import byte_table, look_up, pack, packed_bytes
from shoal.optim.codecs.device_checks import Checks, encoded

CPU_SLAB = 2**18
"""Values processed at once on a CPU: the intermediate results stay in the cache."""
GPU_SLAB = 2**26
"""Values processed at once on a GPU: the launches are few."""


class SectionCodec(Stateless, ABC):
    """Stateless codec that encodes each tensor separately, in slabs.

    Sections begin at multiples of 4 bytes; gaps are zero.
    """

    name: str
    displacement = True

    @abstractmethod
    def section(self, shape: Shape) -> int:
        """Return the bytes that a tensor of this shape needs, without the gap."""

    @abstractmethod
    def write(self, tensor: Tensor, section: Tensor, checks: Checks) -> None:
        """Encode one float32 tensor into ``section``, a zeroed uint8 tensor on the same device.

        ``checks``: as for ``encode``.
        """

    @abstractmethod
    def read(self, section: Tensor, shape: Shape, checks: Checks) -> Tensor:
        """Decode one tensor. ``checks``: as for ``decode``."""

    def nbytes(self, shapes: Sequence[Shape]) -> int:
        return sum(padded(self.section(shape)) for shape in shapes)

    def encode(self, tensors: Sequence[Tensor]) -> Tensor:
        """Encode on the device of the tensors; only the payload is copied from a GPU."""
        return encoded(self, tensors)

    def packed(self, tensors: Sequence[Tensor], checks: Checks) -> Tensor:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        devices = {tensor.device for tensor in tensors}
        device = devices.pop() if len(devices) == 1 else "cpu"
        payload = Checks.payload(self.nbytes(shapes), device)
        offset = 0
        with torch.no_grad():
            for tensor, shape in zip(tensors, shapes, strict=True):
                section = payload[offset : offset + self.section(shape)]
                self.write(tensor.detach().to(payload.device, torch.float32), section, checks)
                offset += padded(self.section(shape))
        return payload

    def decode(self, payload: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        return self.unpacked(payload, shapes, Checks(later=False))

    def unpacked(self, payload: Tensor, shapes: Sequence[Shape], checks: Checks) -> list[Tensor]:
        """Decode into fresh tensors, on the payload's device."""
        payload = check_payload(payload, self.nbytes(shapes), self.name)
        tensors = []
        offset = 0
        with torch.no_grad():
            for shape in shapes:
                section = payload[offset : offset + self.section(shape)]
                tensors.append(self.read(section, shape, checks))
                offset += padded(self.section(shape))
        return tensors


def blocks(count: int, size: int) -> int:
    """Return the number of blocks of ``size`` values that hold ``count`` values; the last may be
    shorter.
    """
    return (count + size - 1) // size


def slabs(flat: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    """Yield views of a flat tensor as matrices of whole blocks, with the number of their first
    block; a short last block alone.
    """
    whole = flat.numel() // size
    most = CPU_SLAB if flat.device.type == "cpu" else GPU_SLAB
    step = max(most // size, 1)
    for first in range(0, whole, step):
        end = min(first + step, whole)
        yield first, flat[first * size : end * size].view(end - first, size)
    if flat.numel() > whole * size:
        yield whole, flat[whole * size :].view(1, -1)


def check_sent(scales: Tensor, checks: Checks) -> None:
    text = (
        "a tensor to be sent holds NaN, infinity or values too large: lower the learning rate "
        "or clip gradients"
    )
    checks.require(scales.isfinite().all(), text)


def check_received(scales: Tensor, checks: Checks) -> None:
    checks.require(
        ((scales >= 0) & scales.isfinite()).all(),
        "the payload has a scale that is negative, infinite or no number",
    )


class DenseCodec(SectionCodec):
    """Codec whose sections hold one float32 scale a block, then the codes of all values, row-major,
    ``width`` bits each.
    """

    width: int
    block: int
    """Values that share a scale; a tensor's last block may be shorter."""

    @abstractmethod
    def quantise(self, values: Tensor, scales: Tensor) -> Tensor:
        """Write the scales of the rows of ``values`` (blocks x values) into ``scales``; return the
        packed codes as flat bytes.
        """

    @abstractmethod
    def restore(self, codes: Tensor, values: Tensor) -> None:
        """Fill ``values`` with the values of the packed codes at a scale of 1."""

    def section(self, shape: Shape) -> int:
        count = math.prod(shape)
        return 4 * blocks(count, self.block) + packed_bytes(count, self.width)

    def fields(self, section: Tensor, count: int, start: int, stop: int) -> list[Tensor]:
        """Return the scales and the codes of whole blocks (`shoal.optim.codecs.two_way`)."""
        at = 4 * blocks(count, self.block)
        first = packed_bytes(start, self.width)
        last = packed_bytes(stop, self.width)
        scales = section[4 * blocks(start, self.block) : 4 * blocks(stop, self.block)]
        return [scales, section[at + first : at + last]]

    def _parts(self, section: Tensor, count: int) -> tuple[Tensor, Tensor]:
        at = 4 * blocks(count, self.block)
        return section[:at].view(torch.float32), section[at:]

    def write(self, tensor: Tensor, section: Tensor, checks: Checks) -> None:
        scales, codes = self._parts(section, tensor.numel())
        for first, values in slabs(tensor.reshape(-1), self.block):
            packed = self.quantise(values, scales[first : first + len(values)])
            at = packed_bytes(first * self.block, self.width)
            codes[at : at + packed.numel()].copy_(packed)
        check_sent(scales, checks)

    def read(self, section: Tensor, shape: Shape, checks: Checks) -> Tensor:
        flat = torch.empty(math.prod(shape), dtype=torch.float32, device=section.device)
        scales, codes = self._parts(section, flat.numel())
        check_received(scales, checks)
        for first, values in slabs(flat, self.block):
            begin = packed_bytes(first * self.block, self.width)
            end = begin + packed_bytes(values.numel(), self.width)
            self.restore(codes[begin:end], values)
            values.mul_(scales[first : first + len(values), None])
        return flat.view(shape)


def _largest(values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Write each row's largest magnitude into ``scales``; return the magnitudes and the scales as
    divisors (1 in place of 0).
    """
    magnitudes = values.abs()
    torch.amax(magnitudes, dim=1, out=scales)
    return magnitudes, torch.where(scales > 0, scales, 1).unsqueeze(1)


class Int8Codec(DenseCodec):
    """Codec of 127 equal steps to either side of zero, up to the block's largest magnitude s.

    The error is at most s/254, half a step, and s/2^22 for the four roundings of float32. Precise
    enough for whole weights too, if the pseudo-gradients of a round are not small compared with
    s/254.
    """

    name = "int8"
    displacement = False
    width = 8
    block = 256

    def quantise(self, values: Tensor, scales: Tensor) -> Tensor:
        magnitudes, divisor = _largest(values, scales)
        steps = torch.div(values, divisor, out=magnitudes).mul_(127).round_()
        return steps.to(torch.int8).view(torch.uint8).view(-1)

    def restore(self, codes: Tensor, values: Tensor) -> None:
        """Divide by 127 before scaling, so that the largest value is exact.

        The code -128, which is never sent, counts as -127.
        """
        # By a tensor: CUDA divides by a number as it multiplies by its reciprocal, and the last bit
        # is another than a CPU's.
        steps = values.new_full((1,), 127.0)
        values.copy_(codes.view(torch.int8).view(values.shape)).clamp_(min=-127).div_(steps)


class SignCodec(DenseCodec):
    """Codec of 1 bit a value, as in 1-bit Adam (2102.02888): each value becomes its sign times the
    block's mean magnitude.

    Zero counts as positive. Use it with error feedback ("sign+ef"): without it small values are
    lost for good. The paper's second compression: docs/internals.md, "Codecs".
    """

    name = "sign"
    width = 1
    block = 1024

    def quantise(self, values: Tensor, scales: Tensor) -> Tensor:
        torch.mean(values.abs(), dim=1, out=scales)
        return pack((values < 0).view(torch.uint8).view(-1), self.width)

    def restore(self, codes: Tensor, values: Tensor) -> None:
        values.view(-1).copy_(look_up(codes, _signs(codes.device), values.numel()))


@functools.cache
def _signs(device: torch.device) -> Tensor:
    return byte_table(torch.tensor([1.0, -1.0], device="cpu")).to(device)
