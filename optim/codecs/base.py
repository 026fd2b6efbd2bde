"""How tensors become bytes on the wire, and back.

A codec must know the size of a payload from the shapes alone, so that a receiver can refuse an oversized one before it allocates.
Here: what a codec is, and plain floats. The others: codec_dense.py (int8, sign), codec_e3m0.py, codec_topk.py, codec_auto.py (a
choice for each tensor) and codec_feedback.py (error feedback around any of them). Their names are parsed in codecs.py.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

Shape = tuple[int, ...]
S = TypeVar("S")

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
    """Turns a list of tensors into one flat buffer of bytes and back.

    ``decode`` depends on the payload and the shapes alone, so it may run in another thread than ``encode``, and every peer
    gets the same values from the same bytes. ``encode`` may keep state (``fresh``).
    """

    @property
    def name(self) -> str:
        """The name that both partners must agree on; ``codec_named`` understands it."""
        ...

    @property
    def displacement(self) -> bool:
        """True if only displacements (pseudo-gradients) may be sent: of whole weights it loses too much."""
        ...

    def nbytes(self, shapes: Sequence[Shape]) -> int:
        """Exact size in bytes of the payload for tensors of these shapes."""
        ...

    def encode(self, tensors: Sequence[Tensor]) -> Tensor:
        """A fresh uint8 tensor on the CPU of ``nbytes`` elements; never shares memory with ``tensors``.

        ValueError if a value cannot be sent (NaN or infinity, except with plain floats); no state has changed then.
        """
        ...

    def decode(self, payload: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        """float32 tensors of the given shapes, on the payload's device; may be views into ``payload``.

        ValueError if the size is wrong or the bytes are not those of an ``encode``. Nothing larger than the shapes is allocated.
        """
        ...

    def fresh(self) -> Codec:
        """The same codec without its state, for another fragment or peer; itself if it has none."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a restarted node needs to go on bit-identically; empty if there is no state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned. ValueError if it is not this codec's; nothing is changed then."""
        ...


class Stateless:
    """The part of ``Codec`` about state, for codecs that have none."""

    def fresh(self: S) -> S:
        """Itself."""
        return self

    def state_dict(self) -> dict[str, Any]:
        """Empty."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """ValueError unless it is empty."""
        if state_dict:
            raise ValueError(f"a codec without state was given the state of {state_dict.get('codec', 'another')}")


def check_payload(payload: Tensor, expected: int, name: str) -> Tensor:
    """``payload``, laid out so that it can be viewed as wider numbers. ValueError unless it is ``expected`` bytes long."""
    if payload.dtype != torch.uint8 or payload.dim() != 1:
        raise ValueError(f"a payload is a flat tensor of bytes, this one is {payload.dtype} of shape {tuple(payload.shape)}")
    if payload.numel() != expected:
        raise ValueError(f"payload has {payload.numel()} bytes, these shapes need {expected} in {name}")
    aligned = payload.stride(0) == 1 and payload.data_ptr() % 4 == 0 and payload.storage_offset() % 4 == 0
    return payload if aligned else torch.empty(expected, dtype=torch.uint8, device=payload.device).copy_(payload)


def check_finite(tensors: Sequence[Tensor], what: str) -> None:
    """ValueError, with ``what`` as its subject, if a value is NaN or infinity."""
    # The sum is finite unless a value is not, or the sum overflows; only then is the slower exact check needed.
    if not all(bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all()) for tensor in tensors):
        raise ValueError(f"{what} holds NaN or infinity: lower the learning rate or clip gradients")


def check_sends_weights(codec: Codec, method: str) -> None:
    """ValueError if ``codec`` is for displacements only; called for every method that sends whole weights."""
    if codec.displacement:
        raise ValueError(
            f"{method} sends whole weights, of which the codec {codec.name} loses too much: choose float32, bfloat16, float16 "
            "or int8, or a method that sends pseudo-gradients"
        )


@dataclass(frozen=True)
class FloatCodec(Stateless):
    """Each value as one little-endian float of ``dtype``, tensor after tensor in row-major order.

    float16 overflows above 65,504 and is meant for pseudo-gradients; for whole weights bfloat16 keeps the range of
    float32 with 8 bits of precision.
    """

    name: str
    dtype: torch.dtype

    @property
    def displacement(self) -> bool:
        """Weights may be sent."""
        return False

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
        flat = check_payload(payload, self.nbytes(shapes), self.name).view(self.dtype).to(torch.float32)
        sizes = [math.prod(shape) for shape in shapes]
        parts = torch.split(flat, sizes)
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


FLOAT32 = FloatCodec("float32", torch.float32)
FLOAT16 = FloatCodec("float16", torch.float16)
BFLOAT16 = FloatCodec("bfloat16", torch.bfloat16)
