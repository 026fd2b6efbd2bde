"""Packing of small integers without gaps: 1, 2 or 4 bits each, or pairs of 12 bits.

    unpack(pack(codes, 4), 4, count)     # codes below 16, two in a byte

The first code is in the lowest bits of the first byte. Vectorised, on any device. Bytes of several
codes are combined in one machine word, which requires a little-endian machine; PyTorch supports no
other.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_WORDS = {1: torch.int64, 2: torch.int32, 4: torch.int16}
"""By the bits of a code: a word that holds the codes of one byte, each in a byte of its own."""


def packed_bytes(count: int, width: int) -> int:
    return (count * width + 7) // 8


def pack(codes: Tensor, width: int) -> Tensor:
    """Pack flat uint8 ``codes`` below 2**width, with ``width`` 1, 2 or 4, into a flat uint8 tensor
    of ``packed_bytes``.
    """
    per_byte = 8 // width
    short = -codes.numel() % per_byte
    whole = functional.pad(codes, (0, short)) if short else codes.contiguous()
    words = whole.view(_WORDS[width])
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
    columns = []
    for shift in range(0, 8, width):
        codes = (byte >> shift) & (2**width - 1)
        columns.append(levels[codes])
    return torch.stack(columns, dim=1)


def look_up(packed: Tensor, table: Tensor, count: int) -> Tensor:
    """Return the ``count`` values that the bytes ``packed`` encode by a ``byte_table``; flat."""
    return table.index_select(0, packed.int()).view(-1)[:count]


def unpack(packed: Tensor, width: int, count: int) -> Tensor:
    """Return the ``count`` codes that ``pack`` has packed, as uint8."""
    codes = torch.arange(2**width, dtype=torch.uint8, device=packed.device)
    return look_up(packed, byte_table(codes), count)


def pack12(codes: Tensor) -> Tensor:
    """Pack integers below 4,096 row by row: shape (rows, n) becomes uint8 of shape (rows,
    ``packed_bytes(n, 12)``).
    """
    rows, count = codes.shape
    low, high = functional.pad(codes, (0, count % 2)).view(rows, -1, 2).unbind(2)
    middle = (low >> 8) | ((high & 0xF) << 4)
    packed = torch.stack((low & 0xFF, middle, high >> 4), dim=2)
    return packed.to(torch.uint8).view(rows, -1)[:, : packed_bytes(count, 12)]


def unpack12(packed: Tensor, count: int) -> Tensor:
    """Invert ``pack12``: return int64 of shape (rows, count)."""
    rows, size = packed.shape
    triples = functional.pad(packed, (0, -size % 3)).long().view(rows, -1, 3)
    first, second, third = triples.unbind(2)
    codes = torch.stack((first | ((second & 0xF) << 8), (second >> 4) | (third << 4)), dim=2)
    return codes.view(rows, -1)[:, :count]
