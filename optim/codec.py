"""How tensors become bytes on the wire, and back.

A codec must know the size of a payload from the shapes alone, so that a receiver can refuse an oversized one before it allocates.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Shape = tuple[int, ...]

HUGE = 4 << 20  # bytes from which on huge pages pay
_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only


def buffer(nbytes: int) -> Tensor:
    """A fresh uint8 tensor on the CPU of ``nbytes`` elements, its content undefined.

    A large one asks for huge pages: to fill memory that was never touched costs three times as much in pages of 4 KiB
    (20 against 6 ms for 40 MB), and every exchange fills two payloads.
    """
    if _HUGE_PAGES is None or nbytes < HUGE:
        return torch.empty(nbytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(_HUGE_PAGES)
    return torch.frombuffer(memory, dtype=torch.uint8)  # which keeps the memory as long as the tensor lives


class Codec(Protocol):
    """Turns a list of tensors into one flat buffer of bytes and back."""

    @property
    def name(self) -> str:
        """The name that both partners must agree on."""
        ...

    def nbytes(self, shapes: Sequence[Shape]) -> int:
        """Exact size in bytes of the payload for tensors of these shapes."""
        ...

    def encode(self, tensors: Sequence[Tensor]) -> Tensor:
        """A fresh uint8 tensor on the CPU of ``nbytes`` elements; never shares memory with ``tensors``."""
        ...

    def decode(self, payload: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        """float32 tensors on the CPU of the given shapes; may be views into ``payload``. ValueError if the size is wrong."""
        ...


@dataclass(frozen=True)
class FloatCodec:
    """Each value as one little-endian float of ``dtype``, tensor after tensor in row-major order.

    float16 overflows above 65,504 and is meant for pseudo-gradients; for whole weights bfloat16 keeps the range of
    float32 with 8 bits of precision.
    """

    name: str
    dtype: torch.dtype

    def nbytes(self, shapes: Sequence[Shape]) -> int:
        """Size of the payload in bytes."""
        return sum(math.prod(shape) for shape in shapes) * self.dtype.itemsize

    def encode(self, tensors: Sequence[Tensor]) -> Tensor:
        """Copy the tensors, rounded to ``dtype``, into one flat buffer."""
        shapes = [tuple(tensor.shape) for tensor in tensors]
        flat = buffer(self.nbytes(shapes)).view(self.dtype)
        offset = 0
        for tensor in tensors:
            flat[offset : offset + tensor.numel()].copy_(tensor.detach().reshape(-1))
            offset += tensor.numel()
        return flat.view(torch.uint8)

    def decode(self, payload: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        """For float32 the result shares the payload's memory; otherwise it is a fresh float32 copy."""
        if payload.numel() != self.nbytes(shapes):
            raise ValueError(f"payload has {payload.numel()} bytes, these shapes need {self.nbytes(shapes)} in {self.name}")
        flat = payload.view(self.dtype).to(torch.float32)
        sizes = [math.prod(shape) for shape in shapes]
        parts = torch.split(flat, sizes)
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


FLOAT32 = FloatCodec("float32", torch.float32)
FLOAT16 = FloatCodec("float16", torch.float16)
BFLOAT16 = FloatCodec("bfloat16", torch.bfloat16)

_CODECS = {codec.name: codec for codec in (FLOAT32, FLOAT16, BFLOAT16)}


def codec_named(name: str) -> Codec:
    """The codec of that name; ValueError lists the known ones."""
    if name not in _CODECS:
        raise ValueError(f"unknown codec {name!r}: choose one of {', '.join(_CODECS)}")
    return _CODECS[name]
