"""SparseLoCo's codec (2508.15706): the largest of each chunk of 4,096 values, 64 or as many as one
asks, with two bits each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from shoal.optim.codecs.base import Checks, Shape
from shoal.optim.codecs.quantized import (
    CPU_SLAB,
    GPU_SLAB,
    SectionCodec,
    blocks,
    check_received,
    check_sent,
    pack,
    pack12,
    packed_bytes,
    unpack,
    unpack12,
)

CHUNK, SIDE = 4096, 64
PART, MOST = 1 / 64, 0.25
EVEN = 16
"""A whole chunk keeps a multiple of so many values: its indices and signs fill whole bytes, and its
levels lie at even bytes.
"""


class TopK2Codec(SectionCodec):
    """Codec that keeps ``part`` of the values as one of +-lo, +-hi; all others become 0.

    By default 1 in 64: 108 bytes for 16,384.

    A chunk is a square of 64 x 64 of a matrix both of whose sides are multiples of 64, else a run
    of 4,096 values in row-major order, the last run perhaps shorter. A whole chunk keeps its part
    rounded up to a multiple of 16 values (64 by default, 416 for a tenth), a short one of n values
    n times ``part``, rounded up. A kept value takes 13 bits.

    Of the kept values, ordered by magnitude, the larger half become hi and the others lo, which are
    the means of their magnitudes (one step of Lloyd's algorithm; the text of the paper that was
    available to us does not give its levels). lo and hi are sent as bfloat16, which has float32's
    range.

    A section is, for the chunks in order, all levels (hi, lo), all indices (12 bits each) and all
    signs (1 bit each, 1 for negative). Indices and signs of the larger half come first, so the bit
    that tells hi from lo need not be sent. A chunk with fewer nonzero values than it may keep
    repeats its first index, which has no effect: zero stays zero.

    Meant for error feedback ("topk2+ef:0.95"): without it a value that is never among the largest
    is never sent.

    Raises:
        ValueError: ``part`` is not in [1/4096, 1/4].
    """

    base = "topk2"

    def __init__(self, part: float = PART) -> None:
        if not 1 / CHUNK <= part <= MOST:
            raise ValueError(
                f"{self.base} keeps a part of the values from 1/{CHUNK} to {MOST:g}, got {part:g}: "
                "to send more, choose auto:BITS"
            )
        self.part = float(
            f"{part:g}"
        )  # as the name says it, or two peers would keep different numbers of values
        self.name = self.base if self.part == PART else f"{self.base}:{self.part:g}"

    def section(self, shape: Shape) -> int:
        whole, rest = divmod(math.prod(shape), CHUNK)
        return whole * _chunk_bytes(self._kept(CHUNK)) + (
            _chunk_bytes(self._kept(rest)) if rest else 0
        )

    def write(self, tensor: Tensor, section: Tensor, checks: Checks) -> None:
        whole, rest = divmod(tensor.numel(), CHUNK)
        at = whole * _chunk_bytes(self._kept(CHUNK))
        if whole:
            first = 0
            levels, indices, signs = _parts(section[:at], whole, self._kept(CHUNK))
            for chunks in _chunks(tensor, whole):
                span = slice(first, first + len(chunks))
                _select(chunks, self._kept(CHUNK), levels[span], indices[span], signs[span], checks)
                first += len(chunks)
        if rest:
            parts = _parts(section[at:], 1, self._kept(rest))
            _select(tensor.reshape(-1)[-rest:].view(1, rest), self._kept(rest), *parts, checks)

    def read(self, section: Tensor, shape: Shape, checks: Checks) -> Tensor:
        """Decode one tensor; only the kept values are written."""
        flat = torch.zeros(math.prod(shape), dtype=torch.float32, device=section.device)
        whole, rest = divmod(flat.numel(), CHUNK)
        at = whole * _chunk_bytes(self._kept(CHUNK))
        if whole:
            places, values = _restore(section[:at], whole, CHUNK, self._kept(CHUNK), checks)
            chunk = torch.arange(whole, device=flat.device).unsqueeze(1)
            if _square(shape):
                across, width = shape[1] // SIDE, shape[1]
                row = chunk // across * SIDE + places // SIDE
                places = row * width + chunk % across * SIDE + places % SIDE
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
    magnitudes, places = chunks.abs().topk(keep, dim=1)
    halves = magnitudes.tensor_split([(keep + 1) // 2], dim=1)
    means = [
        half.sum(1) / (half != 0).sum(1).clamp(min=1) for half in halves
    ]  # of the values above zero; 0 if there are none
    levels.copy_(torch.stack(means, dim=1))
    check_sent(levels, checks)
    places = torch.where(magnitudes == 0, places[:, :1], places)
    indices.copy_(pack12(places))
    negative = (chunks.gather(1, places) < 0).to(torch.uint8)
    if keep % 8:
        signs.copy_(pack(negative.view(-1), 1).view(1, -1))  # a short chunk is the only row
    else:
        signs.copy_(pack(negative.view(-1), 1).view(len(chunks), -1))


def _restore(
    section: Tensor, chunks: int, size: int, keep: int, checks: Checks
) -> tuple[Tensor, Tensor]:
    """Return places within the chunks and values, both (chunks, kept).

    ``checks``: the bytes are such as ``_select`` writes.
    """
    levels, indices, signs = _parts(section, chunks, keep)
    check_received(levels, checks)
    places = unpack12(indices, keep)
    ordered, head = places.sort(dim=1).values, places[:, :1]
    # If a place were named twice, its value would depend on the order in which a device writes.
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != head)
    checks.require(
        (ordered[:, -1] < size).all() & ~twice.any(),
        "the payload names a place twice, or one that is not in its chunk",
    )
    high, low = levels.float().unsqueeze(2).unbind(1)
    values = torch.cat((high.expand(-1, (keep + 1) // 2), low.expand(-1, keep // 2)), dim=1)
    negative = unpack(signs.reshape(-1), 1, chunks * signs.shape[1] * 8).view(chunks, -1)[:, :keep]
    values = torch.where(negative.bool(), -values, values)
    return places, torch.where(places == head, values[:, :1], values)
