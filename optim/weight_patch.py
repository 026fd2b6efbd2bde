"""Sparse, lossless patches between two versions of bfloat16 weights (PULSE, 2602.03839).

At the learning rates of reinforcement learning hardly one value in fifty has other bits in bfloat16
after an update, so that what changed takes a hundredth of the whole.

    patch = encode(bits_of(before), bits_of(after))
    bits = apply(patch, bits_of(before))          # bits_of(after), or PatchError

A patch is a header and a zlib stream: the gaps between the places that changed, a byte each (255:
so many more, and the gap goes on), then the differences of their bits, modulo 2**16: first the
lower byte of each, then the upper ones.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LEVEL = 6
"""Of zlib."""
LONG_GAP = 255
"""A byte that stands for so many unchanged values, after which the gap goes on."""
VALUE_BYTES = 2
"""Of a value in bfloat16."""


class PatchError(ValueError):
    """A patch is none, is for other weights, or makes others than it says."""


@dataclass(frozen=True)
class PatchHeader:
    """What a patch is between, and the sizes of its parts."""

    before: bytes
    """`digest_of` the weights that it is for."""
    after: bytes
    """`digest_of` what it makes of them."""
    values: int
    changed: int
    gap_bytes: int

    FORMAT = struct.Struct("<32s32sQQQ")

    def pack(self) -> bytes:
        return self.FORMAT.pack(self.before, self.after, self.values, self.changed, self.gap_bytes)

    @classmethod
    def read(cls, patch: bytes) -> PatchHeader:
        """Raises PatchError."""
        if len(patch) < cls.FORMAT.size:
            raise PatchError(f"a patch of {len(patch)} bytes is cut off.")
        return cls(*cls.FORMAT.unpack_from(patch))

    @property
    def nbytes(self) -> int:
        """Of what the zlib stream holds."""
        return self.gap_bytes + VALUE_BYTES * self.changed


def bits_of(weights: Sequence[Tensor]) -> Tensor:
    """Return all values in bfloat16 one after another, as their bits, int16, on the CPU."""
    parts = []
    for weight in weights:
        values = weight.detach().to(torch.bfloat16).contiguous()
        parts.append(values.view(torch.int16).flatten().cpu())
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int16, device="cpu")


def whole_of(bits: Tensor) -> bytes:
    """Return the bits as bytes; their SHA-256 is `digest_of` them."""
    return _bytes(bits).tobytes()


def bits_in(whole: bytes) -> Tensor:
    """Return the bits in what `whole_of` returned."""
    return torch.frombuffer(bytearray(whole), dtype=torch.int16) if whole else bits_of([])


def set_bits(weights: Sequence[Tensor], bits: Tensor) -> None:
    """Give ``weights``, of whatever dtype, the values that `bits_of` them made."""
    values = bits.view(torch.bfloat16)
    start = 0
    for weight in weights:
        part = values[start : start + weight.numel()]
        weight.detach().copy_(part.view(weight.shape))
        start += weight.numel()


def digest_of(bits: Tensor) -> bytes:
    """Return the SHA-256 of the bits."""
    return hashlib.sha256(_bytes(bits)).digest()


def encode(before: Tensor, after: Tensor) -> bytes:
    """Return the patch that makes ``after`` of ``before``, both as `bits_of` returns them."""
    if before.shape != after.shape:
        raise ValueError(f"{before.numel()} values cannot become {after.numel()}")
    places = (before != after).nonzero()[:, 0]
    skipped = torch.diff(places, prepend=torch.full((1,), -1, device="cpu")) - 1
    gaps = _pack_gaps(skipped)
    difference = _bytes(after[places] - before[places])
    packed = zlib.compressobj(LEVEL)
    header = PatchHeader(
        digest_of(before), digest_of(after), before.numel(), places.numel(), len(gaps)
    )
    parts = [gaps, difference[0::VALUE_BYTES].tobytes(), difference[1::VALUE_BYTES].tobytes()]
    return b"".join([header.pack(), *map(packed.compress, parts), packed.flush()])


def apply(patch: bytes, before: Tensor) -> Tensor:
    """Return what ``patch`` makes of ``before``, to the last bit.

    What is allocated follows from ``before``, whatever the patch says. Raises PatchError.
    """
    header = PatchHeader.read(patch)
    if header.values != before.numel() or header.before != digest_of(before):
        raise PatchError("the patch is for other weights than these.")
    most_gaps = header.changed + header.values // LONG_GAP
    if header.changed > header.values or header.gap_bytes > most_gaps:
        raise PatchError(f"the patch states {header.changed} changes of {header.values} values.")
    content = _unzip(memoryview(patch)[PatchHeader.FORMAT.size :], header.nbytes)
    places = _places(content[: header.gap_bytes])
    is_beyond = len(places) > 0 and int(places[-1]) >= header.values
    if len(places) != header.changed or is_beyond:
        raise PatchError("the patch changes values that are not there.")
    lower, upper = content[header.gap_bytes :].view(VALUE_BYTES, -1)
    after = before.clone()
    after[places] += torch.stack([lower, upper], 1).view(torch.int16)[:, 0]
    if digest_of(after) != header.after:
        raise PatchError("the patch makes other weights than it says.")
    return after


def _pack_gaps(skipped: Tensor) -> bytes:
    """Return a byte for each number of unchanged values, after as many 255 as it has."""
    long = skipped // LONG_GAP
    ends = (long + 1).cumsum(0) - 1
    size = int(ends[-1]) + 1 if len(ends) else 0
    packed = torch.full((size,), LONG_GAP, dtype=torch.uint8, device="cpu")
    packed[ends] = (skipped % LONG_GAP).to(torch.uint8)
    return packed.numpy().tobytes()


def _places(gaps: Tensor) -> Tensor:
    """Return the places that changed, in their order."""
    ends = (gaps < LONG_GAP).nonzero()[:, 0]
    reached = gaps.long().cumsum(0)[ends]
    return reached + torch.arange(len(ends), device="cpu")


def _unzip(packed: memoryview, nbytes: int) -> Tensor:
    """Return ``nbytes`` bytes, uint8. Raises PatchError if these are not what is in ``packed``."""
    opened = zlib.decompressobj()
    try:
        content = opened.decompress(packed, nbytes + 1)
    except zlib.error as error:
        raise PatchError(f"the patch cannot be opened: {error}.") from error
    if len(content) != nbytes or not opened.eof or opened.unused_data:
        raise PatchError(f"the patch holds other than the {nbytes} bytes that it states.")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if nbytes else _NOTHING


_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


def _bytes(bits: Tensor) -> memoryview:
    return bits.contiguous().view(torch.uint8).numpy().data
