"""Codecs that send every value, in 8, 4 or 1 bits, with one scale for each block of consecutive
values of a tensor.

For a payload's layout see ``DenseCodec``; a value takes 1 + 1/64 bytes with int8 and 1/8 + 1/256
with sign.

Packing of small integers without gaps: 1, 2 or 4 bits each, and pairs of 12 bits. Vectorised, on
any device.

The first code is in the lowest bits of the first byte. Bytes of several codes are combined in one
machine word, which requires a little-endian machine; PyTorch supports no other.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from shoal.optim.codecs.base import Checks, Shape, Stateless, check_payload, encoded, padded

# A word holds the codes of one byte, each in a byte of its own.
_WORDS = {1: torch.int64, 2: torch.int32, 4: torch.int16}


def packed_bytes(count: int, width: int) -> int:
    return (count * width + 7) // 8


def pack(codes: Tensor, width: int) -> Tensor:
    """Pack flat uint8 ``codes`` below 2**width, with ``width`` 1, 2 or 4, into a flat uint8 tensor
    of ``packed_bytes``.
    """
    per_byte = 8 // width
    short = -codes.numel() % per_byte
    words = (functional.pad(codes, (0, short)) if short else codes.contiguous()).view(_WORDS[width])
    if width == 1:
        # Bit i of the highest byte of the product is the lowest bit of byte i: the partial products
        # do not overlap.
        return ((words * 0x0102040810204080) >> 56).to(torch.uint8)
    packed = words.clone()
    for place in range(1, per_byte):
        packed |= words >> place * (8 - width)
    return (packed & 0xFF).to(torch.uint8)


def byte_table(levels: Tensor) -> Tensor:
    """Return the values that each of the 256 bytes encodes when its codes of width 1, 2 or 4 index
    the 2, 4 or 16 ``levels``.

    The shape is (256, codes per byte), dtype and device are those of ``levels``.
    """
    width = {2: 1, 4: 2, 16: 4}[levels.numel()]
    byte = torch.arange(256, device=levels.device)
    return torch.stack(
        [levels[(byte >> shift) & (2**width - 1)] for shift in range(0, 8, width)], dim=1
    )


def look_up(packed: Tensor, table: Tensor, count: int) -> Tensor:
    """Return the ``count`` values that the bytes ``packed`` encode by a ``byte_table``; flat."""
    return table.index_select(0, packed.int()).view(-1)[:count]


def unpack(packed: Tensor, width: int, count: int) -> Tensor:
    """Return the ``count`` codes that ``pack`` has packed, as uint8."""
    return look_up(
        packed, byte_table(torch.arange(2**width, dtype=torch.uint8, device=packed.device)), count
    )


def pack12(codes: Tensor) -> Tensor:
    """Pack integers below 4,096 row by row: shape (rows, n) becomes uint8 of shape (rows,
    ``packed_bytes(n, 12)``).
    """
    rows, count = codes.shape
    low, high = functional.pad(codes, (0, count % 2)).view(rows, -1, 2).unbind(2)
    packed = torch.stack((low & 0xFF, (low >> 8) | ((high & 0xF) << 4), high >> 4), dim=2)
    return packed.to(torch.uint8).view(rows, -1)[:, : packed_bytes(count, 12)]


def unpack12(packed: Tensor, count: int) -> Tensor:
    """Invert ``pack12``: return int64 of shape (rows, count)."""
    rows, size = packed.shape
    first, second, third = functional.pad(packed, (0, -size % 3)).long().view(rows, -1, 3).unbind(2)
    codes = torch.stack((first | ((second & 0xF) << 8), (second >> 4) | (third << 4)), dim=2)
    return codes.view(rows, -1)[:, :count]


CPU_SLAB, GPU_SLAB = 2**18, 2**26
"""Values processed at once: on a CPU the intermediate results stay in the cache, on a GPU the
launches are few.
"""


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
        payload = Checks.payload(self.nbytes(shapes), devices.pop() if len(devices) == 1 else "cpu")
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
        tensors, offset = [], 0
        with torch.no_grad():
            for shape in shapes:
                tensors.append(
                    self.read(payload[offset : offset + self.section(shape)], shape, checks)
                )
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
    step = max((CPU_SLAB if flat.device.type == "cpu" else GPU_SLAB) // size, 1)
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
        return 4 * blocks(math.prod(shape), self.block) + packed_bytes(math.prod(shape), self.width)

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
            at = packed_bytes(first * self.block, self.width)
            self.restore(codes[at : at + packed_bytes(values.numel(), self.width)], values)
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
    """Codec of 127 equal steps to either side of zero up to the block's largest magnitude s; error
    at most s/254 + s/2^22.

    Half a step is s/254; the second term bounds the four float32 roundings, two of the quotient and
    two of the product.

    Precise enough for whole weights too, if the pseudo-gradients of a round are not small compared
    with s/254.
    """

    name, displacement, width, block = "int8", False, 8, 256

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
        values.copy_(codes.view(torch.int8).view(values.shape)).clamp_(min=-127).div_(
            values.new_full((1,), 127.0)
        )


class SignCodec(DenseCodec):
    """Codec of 1 bit a value, as in 1-bit Adam (2102.02888): each value becomes its sign times the
    block's mean magnitude.

    Zero counts as positive. Use it with error feedback ("sign+ef"): without it small values are
    lost for good. The paper compresses twice, each time with feedback: the peers' contributions and
    the mean that a reducer sends back. A reducer needs a codec of its own (``fresh``); between
    pairs nothing is sent back.
    """

    name, width, block = "sign", 1, 1024

    def quantise(self, values: Tensor, scales: Tensor) -> Tensor:
        torch.mean(values.abs(), dim=1, out=scales)
        return pack((values < 0).view(torch.uint8).view(-1), self.width)

    def restore(self, codes: Tensor, values: Tensor) -> None:
        values.view(-1).copy_(look_up(codes, _signs(codes.device), values.numel()))


@functools.cache
def _signs(device: torch.device) -> Tensor:
    return byte_table(torch.tensor([1.0, -1.0], device="cpu")).to(device)


BLOCK = 256
WORD = 16  # digits in a word of 63 bits, for 15 ** 16 < 2 ** 63; as many words make a block
DIGITS, QUARTER = 15, 15**4


class E3M0Codec(SectionCodec):
    """Codec of Streaming DiLoCo (2501.18512): a sign and 3 bits of exponent, no mantissa.

    The paper does not give the scaling, so this is ours: with s the block's largest magnitude
    rounded to bfloat16, a value is 0 or one of +-s 2^-k, k = 0..6, the nearest. Error at most |x|/3
    where |x| >= s/64, and at most s/128 below. A common factor that is a power of two is preserved
    exactly.

    Those are 15 levels and not 16. So 16 values, as the digits of a number to the base of 15, fit
    into 63 bits of a word, and the remaining bits of a block's 16 words hold its scale: 4 bits a
    value in all, where a separate scale would need more. The digits are 0 for zero, 8 - k - 1 for
    positive and 15 - k - 1 for negative levels, the first value the lowest digit; bit j of the
    scale is the sign of word j. The rest of a tensor after whole blocks: its scale in 2 bytes, then
    4 bits a value.
    """

    name = "e3m0"

    def section(self, shape: Shape) -> int:
        whole, rest = divmod(math.prod(shape), BLOCK)
        return whole * BLOCK // 2 + (2 + packed_bytes(rest, 4) if rest else 0)

    def write(self, tensor: Tensor, section: Tensor, checks: Checks) -> None:
        for first, values in slabs(tensor.reshape(-1), BLOCK):
            scales = values.abs().amax(dim=1).bfloat16()
            check_sent(scales, checks)
            digits = _digits(values, scales.float())
            if values.shape[1] == BLOCK:
                part = _to_words(digits, scales).view(torch.uint8)
            else:
                part = torch.cat((scales.view(torch.uint8), pack(digits.view(-1), 4)))
            at = first * BLOCK // 2
            section[at : at + part.numel()].copy_(part.view(-1))

    def read(self, section: Tensor, shape: Shape, checks: Checks) -> Tensor:
        flat = torch.empty(math.prod(shape), dtype=torch.float32, device=section.device)
        for first, values in slabs(flat, BLOCK):
            at = first * BLOCK // 2
            if values.shape[1] == BLOCK:
                # A copy, because words must begin at multiples of 8 bytes.
                words = (
                    section[at : at + values.numel() // 2].clone().view(torch.int64).view(-1, WORD)
                )
                scales = _from_words(words, values, checks)
            else:
                part = section[at:].clone()
                scales = part[:2].view(torch.bfloat16)
                values.view(-1).copy_(
                    look_up(part[2:], byte_table(_levels(section.device)), values.numel())
                )
            check_received(scales, checks)
            values.mul_(scales.float()[:, None])
        return flat.view(shape)


def _digits(values: Tensor, scales: Tensor) -> Tensor:
    """Return the nearest level of each value, uint8 (blocks, values), exactly: by integer
    arithmetic on the bits of the floats.
    """
    magnitudes = values.abs()
    ratios = magnitudes.div_(torch.where(scales > 0, scales, 1)[:, None])
    above = ratios >= 2.0**-7  # half of the least level: not zero
    # Adding half of the mantissa's range carries into the exponent from 1.5 times a power of two
    # on: rounds to the nearer one.
    digits = ratios.view(torch.int32).add_(1 << 22).bitwise_right_shift_(23).sub_(120)
    digits = torch.maximum(digits, above.int()).clamp_(0, 7)
    digits += (values < 0).int().mul_(7).mul_(digits > 0)
    return digits.to(torch.uint8)


def _to_words(digits: Tensor, scales: Tensor) -> Tensor:
    """Return the words that encode the digits and scales, int64 (blocks, 16)."""
    fours = digits.view(torch.int32)  # four digits, a byte each
    quarters = fours & 0xFF
    for place in range(1, 4):
        quarters += (fours >> 8 * place & 0xFF) * DIGITS**place
    quarters = quarters.view(len(digits), WORD, 4).long()
    words = quarters[..., 3]
    for place in (2, 1, 0):
        words = words * QUARTER + quarters[..., place]
    bits = scales.view(torch.int16).long()[:, None] >> torch.arange(WORD, device=digits.device) & 1
    return words | bits << 63


def _from_words(words: Tensor, values: Tensor, checks: Checks) -> Tensor:
    """Fill ``values`` (blocks, 256) with the levels; return the scales.

    ``checks``: no word is too large for its digits.
    """
    places = torch.arange(WORD, device=words.device)
    bits = ((words < 0).int() << places).sum(1, dtype=torch.int32)
    scales = bits.to(torch.int16).view(torch.bfloat16)
    rest = words & 0x7FFF_FFFF_FFFF_FFFF
    quarters = torch.empty((*words.shape, 4), dtype=torch.int64, device=words.device)
    for place in range(3):
        higher = rest.div(QUARTER, rounding_mode="trunc")
        torch.sub(rest, higher * QUARTER, out=quarters[..., place])
        rest = higher
    checks.require((rest < QUARTER).all(), "the payload has a word that encodes no values")
    quarters[..., 3] = rest
    values.view(-1, 4).copy_(_fours(words.device).index_select(0, quarters.view(-1)))
    return scales


@functools.cache
def _levels(device: torch.device) -> Tensor:
    """Return the value of each digit at a scale of 1; 15 is never sent."""
    powers = [2.0**-k for k in range(6, -1, -1)]
    return torch.tensor([0.0, *powers, *(-power for power in powers), 0.0], device=device)


@functools.lru_cache(maxsize=8)
def _fours(device: torch.device) -> Tensor:
    """Return the values of four digits by the number that they form: (50625, 4)."""
    index = torch.arange(QUARTER, device=device)
    return _levels(device)[
        torch.stack([index // DIGITS**place % DIGITS for place in range(4)], dim=1)
    ]
