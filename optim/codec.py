"""How tensors become bytes on the wire, and back.

A codec must know the size of a payload from the shapes alone, so that a receiver can refuse an oversized one before it allocates.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Shape = tuple[int, ...]

SMALL = 1 << 20  # bytes; below it fresh memory costs nothing worth keeping
_kept: deque[bytearray] = deque(maxlen=2)  # what one exchange takes


def buffer(nbytes: int) -> Tensor:
    """A uint8 tensor on the CPU of ``nbytes`` elements, its content undefined, its memory in nobody else's use.

    When the last tensor in it is gone, the memory is kept for the next call, two of them at most: the kernel takes longer to
    hand out fresh pages (and the host below, if this is a virtual machine) than it takes to hash what is then put into them.
    """
    if nbytes < SMALL:
        return torch.empty(nbytes, dtype=torch.uint8)
    memory = _again(nbytes) or bytearray(nbytes)
    lease = memoryview(memory)  # the tensor's storage refers to it
    weakref.finalize(lease, _kept.append, memory).atexit = False
    return torch.frombuffer(lease, dtype=torch.uint8, count=nbytes)


def _again(nbytes: int) -> bytearray | None:
    """Memory that was kept and fits; what does not fit is let go."""
    with contextlib.suppress(IndexError):  # none is left
        while True:
            memory = _kept.popleft()
            if nbytes <= len(memory) <= nbytes + nbytes // 4:
                return memory
    return None


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
