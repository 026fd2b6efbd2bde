"""SparseLoCo's codec (2508.15706): of each chunk of 4,096 values the largest, with two bits each.

    TopK2Codec().encode(tensors)         # 1 value in 64: 108 bytes for 16,384
    TopK2Codec(0.1).encode(tensors)      # a tenth of the values

A kept value takes 13 bits. Where its levels come from: docs/internals.md, "Codecs".
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from shoal.optim.codecs.base import Shape
from shoal.optim.codecs.bits import pack, pack12, packed_bytes, unpack, unpack12
from shoal.optim.codecs.device_checks import Checks
from shoal.optim.codecs.quantized import (
    CPU_SLAB,
    GPU_SLAB,
    SectionCodec,
    blocks,
    check_received,
    check_sent,
)

CHUNK = 4096
"""Values in a chunk."""
SIDE = 64
"""Values in a row of a square chunk."""
PART = 1 / 64
"""Of the values are kept by default, as in the paper."""
MOST_PART = 0.25
"""At most: beyond it a codec that sends every value has the smaller error."""
EVEN = 16
"""A whole chunk keeps a multiple of so many values: its indices and signs fill whole bytes, and its
levels lie at even bytes.
"""


class TopK2Codec(SectionCodec):
    """Codec that keeps ``part`` of the values as one of +-lo, +-hi; all others become 0.

    A chunk is a square of 64 x 64 of a matrix both of whose sides are multiples of 64, else a run
    of 4,096 values in row-major order, the last run perhaps shorter. A whole chunk keeps its part
    rounded up to a multiple of 16 values (64 by default, 416 for a tenth), a short one of n values
    n times ``part``, rounded up. Of these the larger half become hi and the others lo, the means of
    their magnitudes, in bfloat16.

    Meant for error feedback: else a value that is never among the largest is never sent.

    Raises:
        ValueError: ``part`` is not in [1/4096, 1/4].
    """

    base = "topk2"

    def __init__(self, part: float = PART) -> None:
        if not 1 / CHUNK <= part <= MOST_PART:
            raise ValueError(
                f"{self.base} keeps a part of the values from 1/{CHUNK} to {MOST_PART:g}, got "
                f"{part:g}: to send more, choose auto:BITS"
            )
        # As the name says it, or two peers would keep different numbers of values.
        self.part = float(f"{part:g}")
        self.name = self.base if self.part == PART else f"{self.base}:{self.part:g}"

    def section(self, shape: Shape) -> int:
        """Return the bytes of, for the chunks in order, all levels (hi, lo), all indices (12 bits
        each) and all signs (1 bit each, 1 for negative), those of the larger half first.

        A chunk with fewer nonzero values than it may keep repeats its first index, which has no
        effect.
        """
        whole, rest = divmod(math.prod(shape), CHUNK)
        size = whole * _chunk_bytes(self._kept(CHUNK))
        if rest:
            size += _chunk_bytes(self._kept(rest))
        return size

    def write(self, tensor: Tensor, section: Tensor, checks: Checks) -> None:
        whole, rest = divmod(tensor.numel(), CHUNK)
        at = whole * _chunk_bytes(self._kept(CHUNK))
        if whole:
            keep = self._kept(CHUNK)
            first = 0
            levels, indices, signs = _parts(section[:at], whole, keep)
            for chunks in _chunks(tensor, whole):
                span = slice(first, first + len(chunks))
                _select(chunks, keep, levels[span], indices[span], signs[span], checks)
                first += len(chunks)
        if rest:
            keep = self._kept(rest)
            chunk = tensor.reshape(-1)[-rest:].view(1, rest)
            _select(chunk, keep, *_parts(section[at:], 1, keep), checks)

    def read(self, section: Tensor, shape: Shape, checks: Checks) -> Tensor:
        """Decode one tensor; only the kept values are written."""
        flat = torch.zeros(math.prod(shape), dtype=torch.float32, device=section.device)
        whole, rest = divmod(flat.numel(), CHUNK)
        at = whole * _chunk_bytes(self._kept(CHUNK))
        if whole:
            places, values = _restore(section[:at], whole, CHUNK, self._kept(CHUNK), checks)
            chunk = torch.arange(whole, device=flat.device).unsqueeze(1)
            if _square(shape):
                width = shape[1]
                across = width // SIDE
                row = chunk // across * SIDE + places // SIDE
                column = chunk % across * SIDE + places % SIDE
                places = row * width + column
            else:
                places += chunk * CHUNK
            flat[places.view(-1)] = values.view(-1)
        if rest:
            places, values = _restore(section[at:], 1, rest, self._kept(rest), checks)
            flat[places.view(-1) + whole * CHUNK] = values.view(-1)
        return flat.view(shape)

    def _kept(self, size: int) -> int:
        count = math.ceil(size * self.part)
        return blocks(count, EVEN) * EVEN if size == CHUNK else count


def _square(shape: Shape) -> bool:
    return len(shape) == 2 and shape[0] % SIDE == 0 and shape[1] % SIDE == 0


def _chunks(tensor: Tensor, whole: int) -> Iterator[Tensor]:
    """Yield the whole chunks of a tensor as rows, some at a time."""
    slab = CPU_SLAB if tensor.device.type == "cpu" else GPU_SLAB
    if _square(tuple(tensor.shape)):
        across = tensor.shape[1] // SIDE
        squares = tensor.reshape(-1, SIDE, across, SIDE)
        step = max(slab // (across * CHUNK), 1)
        for first in range(0, len(squares), step):
            yield squares[first : first + step].transpose(1, 2).reshape(-1, CHUNK)
    else:
        flat = tensor.reshape(-1)
        for first in range(0, whole, slab // CHUNK):
            end = min(first + slab // CHUNK, whole)
            yield flat[first * CHUNK : end * CHUNK].view(-1, CHUNK)


def _chunk_bytes(keep: int) -> int:
    return 4 + packed_bytes(keep, 12) + packed_bytes(keep, 1)


def _parts(section: Tensor, chunks: int, keep: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of a section of ``chunks`` chunks that keep so many values each: levels, packed
    indices, signs, row by row.
    """
    sizes = [chunks * 4, chunks * packed_bytes(keep, 12), chunks * packed_bytes(keep, 1)]
    levels, indices, signs = torch.split(section, sizes)
    return (
        levels.view(torch.bfloat16).view(chunks, 2),
        indices.view(chunks, -1),
        signs.view(chunks, -1),
    )


def _select(
    chunks: Tensor, keep: int, levels: Tensor, indices: Tensor, signs: Tensor, checks: Checks
) -> None:
    """Write the levels, indices and signs of the chunks, a row each."""
    magnitudes, places = chunks.abs().topk(keep, dim=1)
    means = []
    for half in magnitudes.tensor_split([(keep + 1) // 2], dim=1):
        count = (half != 0).sum(1).clamp(min=1)
        means.append(half.sum(1) / count)  # of the values above zero; 0 if there are none
    levels.copy_(torch.stack(means, dim=1))
    check_sent(levels, checks)
    places = torch.where(magnitudes == 0, places[:, :1], places)
    indices.copy_(pack12(places))
    negative = (chunks.gather(1, places) < 0).to(torch.uint8)
    # The signs of a short chunk, which is the only row, need not fill whole bytes.
    rows = 1 if keep % 8 else len(chunks)
    signs.copy_(pack(negative.view(-1), 1).view(rows, -1))


def _restore(
    section: Tensor, chunks: int, size: int, keep: int, checks: Checks
) -> tuple[Tensor, Tensor]:
    """Return places within the chunks and values, both (chunks, kept).

    ``checks``: the bytes are such as ``_select`` writes.
    """
    levels, indices, signs = _parts(section, chunks, keep)
    check_received(levels, checks)
    places = unpack12(indices, keep)
    ordered = places.sort(dim=1).values
    head = places[:, :1]
    # If a place were named twice, its value would depend on the order in which a device writes.
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != head)
    checks.require(
        (ordered[:, -1] < size).all() & ~twice.any(),
        "the payload names a place twice, or one that is not in its chunk",
    )
    high, low = levels.float().unsqueeze(2).unbind(1)
    values = torch.cat((high.expand(-1, (keep + 1) // 2), low.expand(-1, keep // 2)), dim=1)
    flags = unpack(signs.reshape(-1), 1, chunks * signs.shape[1] * 8)
    negative = flags.view(chunks, -1)[:, :keep].bool()
    values = torch.where(negative, -values, values)
    return places, torch.where(places == head, values[:, :1], values)
