"""The codec of Streaming DiLoCo.

    E3M0Codec().encode(tensors)     # half a byte a value, scales included

A value has 4 bits: a sign, and an exponent without a mantissa.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from shoal.optim.codecs.base import Shape
from shoal.optim.codecs.bits import byte_table, look_up, pack, packed_bytes
from shoal.optim.codecs.device_checks import Checks
from shoal.optim.codecs.quantized import SectionCodec, check_received, check_sent, slabs

BLOCK = 256
"""Values that share a scale."""
WORD = 16
"""Digits in a word of 63 bits, for 15^16 < 2^63; as many words make a block."""
DIGITS = 15
QUARTER = DIGITS**4
"""Of a word's digits are worked on at once, by a table of that many entries."""


class E3M0Codec(SectionCodec):
    """Codec of Streaming DiLoCo (2501.18512): a sign and 3 bits of exponent, no mantissa.

    With s the block's largest magnitude rounded to bfloat16, a value is 0 or one of +-s 2^-k,
    k = 0..6, the nearest. Error at most |x|/3 where |x| >= s/64, and at most s/128 below. A common
    factor that is a power of two is preserved exactly.

    Those are 15 levels: 16 values are the digits of a number of 63 bits, and the last bits of a
    block's 16 words hold its scale. The digits are 0 for zero, 8 - k - 1 for positive and
    15 - k - 1 for negative levels, the first value the lowest digit; bit j of the scale is the sign
    of word j. What follows whole blocks has its scale in 2 bytes, then 4 bits a value. Why so:
    docs/internals.md, "Codecs".
    """

    name = "e3m0"

    def section(self, shape: Shape) -> int:
        whole, rest = divmod(math.prod(shape), BLOCK)
        size = whole * BLOCK // 2
        if rest:
            size += 2 + packed_bytes(rest, 4)
        return size

    def fields(self, section: Tensor, count: int, start: int, stop: int) -> list[Tensor]:
        """Return the bytes of whole blocks (`shoal.optim.codecs.two_way`)."""
        end = section.numel() if stop == count else stop // 2
        return [section[start // 2 : end]]

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
                part = section[at : at + values.numel() // 2].clone()
                words = part.view(torch.int64).view(-1, WORD)
                scales = _from_words(words, values, checks)
            else:
                part = section[at:].clone()
                scales = part[:2].view(torch.bfloat16)
                table = byte_table(_levels(section.device))
                values.view(-1).copy_(look_up(part[2:], table, values.numel()))
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
    places = torch.arange(WORD, device=digits.device)
    bits = scales.view(torch.int16).long()[:, None] >> places & 1
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
    digits = [index // DIGITS**place % DIGITS for place in range(4)]
    return _levels(device)[torch.stack(digits, dim=1)]
