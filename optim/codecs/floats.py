"""The codecs of plain floats: ``FLOAT32``, ``FLOAT16`` and ``BFLOAT16``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.optim.codecs.base import Shape, Stateless, all_finite, check_payload
from shoal.optim.codecs.device_checks import Checks, encoded
from shoal.optim.codecs.memory import buffer
from shoal.optim.device import accelerator_of


@dataclass(frozen=True)
class FloatCodec(Stateless):
    """Codec that sends each value as one little-endian float of ``dtype``, rounded to the nearest,
    ties to even; tensor after tensor in row-major order.

    float16 ends at 65,504 and is meant for pseudo-gradients; for whole weights bfloat16 keeps the
    range of float32 with 8 bits of precision. A finite value that would become infinite is refused,
    as it is by the other codecs: the mean of all would be lost.
    """

    name: str
    dtype: torch.dtype

    @property
    def displacement(self) -> bool:
        return False

    def nbytes(self, shapes: Sequence[Shape]) -> int:
        return sum(math.prod(shape) for shape in shapes) * self.dtype.itemsize

    def encode(self, tensors: Sequence[Tensor]) -> Tensor:
        """Copy the tensors, rounded to ``dtype``, into one flat buffer.

        ValueError for a finite value too large for ``dtype``.
        """
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if accelerator_of(tensors) is not None:
            try:
                return encoded(self, tensors)
            except ValueError:
                self.check_range(tensors)  # says which value it was
                raise
        flat = buffer(self.nbytes(shapes)).view(self.dtype)
        offset = 0
        for tensor in tensors:
            flat[offset : offset + tensor.numel()].copy_(tensor.detach().reshape(-1))
            offset += tensor.numel()
        if not all_finite([flat]):
            self.check_range(tensors)
        return flat.view(torch.uint8)

    @torch.no_grad()
    def packed(self, tensors: Sequence[Tensor], checks: Checks) -> Tensor:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        payload = Checks.payload(self.nbytes(shapes), tensors[0].device)
        flat = payload.view(self.dtype)
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        fits = []
        for tensor, part in zip(tensors, parts, strict=True):
            values = tensor.detach().reshape(-1)
            part.copy_(values)
            if self.dtype != torch.float32:  # NaN and infinity are sent as they are
                fits.append(~(values.isfinite() & part.isinf()).any())
        if fits:
            checks.require(
                torch.stack(fits).all(), f"a value to be sent is too large for {self.name}"
            )
        return payload

    def unpacked(self, payload: Tensor, shapes: Sequence[Shape], checks: Checks) -> list[Tensor]:
        return self.decode(payload, shapes)

    def check_range(self, tensors: Sequence[Tensor]) -> None:
        """Raise ValueError for a finite value that ``dtype`` cannot hold."""
        for tensor in tensors:
            over = tensor.isfinite() & tensor.to(self.dtype).isinf()
            if bool(over.any()):
                raise ValueError(
                    f"a value of {float(tensor[over][0]):.6g} is too large for {self.name}, which "
                    f"ends at {torch.finfo(self.dtype).max:.6g}: choose float32 (or bfloat16), "
                    "lower the learning rate, or clip gradients"
                )

    def decode(self, payload: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        """Decode as float32: views into the payload if that is float32, else fresh copies."""
        payload = check_payload(payload, self.nbytes(shapes), self.name)
        flat = payload.view(self.dtype).to(torch.float32)
        parts = torch.split(flat, [math.prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


FLOAT32 = FloatCodec("float32", torch.float32)
FLOAT16 = FloatCodec("float16", torch.float16)
BFLOAT16 = FloatCodec("bfloat16", torch.bfloat16)
FLOAT_CODECS = (FLOAT32, FLOAT16, BFLOAT16)
