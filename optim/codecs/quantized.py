"""Codecs that send every value, in 8 or 1 bits, with one float32 scale for each block of consecutive values of a tensor.

For a payload's layout see ``DenseCodec``; a value takes 1 + 1/64 bytes with int8 and 1/8 + 1/256 with sign.
"""

from __future__ import annotations

import functools
from abc import abstractmethod

import torch
from torch import Tensor

from shoal.optim.codecs.base import Checks, Shape
from shoal.optim.codecs.bitpack import byte_table, look_up, pack, packed_bytes
from shoal.optim.codecs.blockwise import SectionCodec, blocks, check_received, check_sent, numel, slabs


class DenseCodec(SectionCodec):
    """Codec whose sections hold one float32 scale a block, then the codes of all values, row-major, ``width`` bits each."""

    width: int
    block: int
    """Values that share a scale; a tensor's last block may be shorter."""

    @abstractmethod
    def quantise(self, values: Tensor, scales: Tensor) -> Tensor:
        """Write the scales of the rows of ``values`` (blocks x values) into ``scales``; return the packed codes as flat bytes."""

    @abstractmethod
    def restore(self, codes: Tensor, values: Tensor) -> None:
        """Fill ``values`` with the values of the packed codes at a scale of 1."""

    def section(self, shape: Shape) -> int:
        return 4 * blocks(numel(shape), self.block) + packed_bytes(numel(shape), self.width)

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
        flat = torch.empty(numel(shape), dtype=torch.float32, device=section.device)
        scales, codes = self._parts(section, flat.numel())
        check_received(scales, checks)
        for first, values in slabs(flat, self.block):
            at = packed_bytes(first * self.block, self.width)
            self.restore(codes[at : at + packed_bytes(values.numel(), self.width)], values)
            values.mul_(scales[first : first + len(values), None])
        return flat.view(shape)


def _largest(values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Write each row's largest magnitude into ``scales``; return the magnitudes and the scales as divisors (1 in place of 0)."""
    magnitudes = values.abs()
    torch.amax(magnitudes, dim=1, out=scales)
    return magnitudes, torch.where(scales > 0, scales, 1).unsqueeze(1)


class Int8Codec(DenseCodec):
    """Codec of 127 equal steps to either side of zero up to the block's largest magnitude s; error at most s/254 + s/2^22.

    Half a step is s/254; the second term bounds the four float32 roundings, two of the quotient and two of the product.

    Precise enough for whole weights too, if the pseudo-gradients of a round are not small compared with s/254.
    """

    name, displacement, width, block = "int8", False, 8, 256

    def quantise(self, values: Tensor, scales: Tensor) -> Tensor:
        magnitudes, divisor = _largest(values, scales)
        steps = torch.div(values, divisor, out=magnitudes).mul_(127).round_()
        return steps.to(torch.int8).view(torch.uint8).view(-1)

    def restore(self, codes: Tensor, values: Tensor) -> None:
        """Divide by 127 before scaling, so that the largest value is exact. The code -128, which is never sent, counts as -127."""
        values.copy_(codes.view(torch.int8).view(values.shape)).clamp_(min=-127).div_(127)


class SignCodec(DenseCodec):
    """Codec of 1 bit a value, as in 1-bit Adam (2102.02888): each value becomes its sign times the block's mean magnitude.

    Zero counts as positive. Use it with error feedback ("sign+ef"): without it small values are lost for good. The paper
    compresses twice, each time with feedback: the peers' contributions and the mean that a reducer sends back. A reducer needs a
    codec of its own (``fresh``); between pairs nothing is sent back.
    """

    name, width, block = "sign", 1, 1024

    def quantise(self, values: Tensor, scales: Tensor) -> Tensor:
        """Pack one bit a value, 1 for negative."""
        torch.mean(values.abs(), dim=1, out=scales)
        return pack((values < 0).view(torch.uint8).view(-1), self.width)

    def restore(self, codes: Tensor, values: Tensor) -> None:
        values.view(-1).copy_(look_up(codes, _signs(codes.device), values.numel()))


@functools.cache
def _signs(device: torch.device) -> Tensor:
    return byte_table(torch.tensor([1.0, -1.0], device="cpu")).to(device)
