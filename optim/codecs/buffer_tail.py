"""A codec of which the last tensors, a model's averaged buffers, are sent as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.optim.codecs.base import Codec, Shape, padded
from shoal.optim.codecs.device_checks import Checks, encoded, packed, unpacked
from shoal.optim.codecs.floats import FLOAT32
from shoal.optim.device import accelerator_of


@dataclass(frozen=True)
class BufferTailCodec:
    """Codec that sends the last ``count`` tensors as float32, since averaged buffers stand no loss,
    and the rest by ``codec``.
    """

    codec: Codec
    count: int

    @property
    def name(self) -> str:
        """Both codecs' names, since both partners must send the same tail."""
        return f"{self.codec.name},{self.count}xfloat32"

    @property
    def displacement(self) -> bool:
        return self.codec.displacement

    def nbytes(self, shapes: Sequence[Shape]) -> int:
        head, tail = self._cut(shapes)
        return padded(self.codec.nbytes(head)) + FLOAT32.nbytes(tail)

    def encode(self, tensors: Sequence[Tensor]) -> Tensor:
        """Encode the head, zeros up to a multiple of 4 bytes, and the tail."""
        return encoded(self, tensors)

    def packed(self, tensors: Sequence[Tensor], checks: Checks) -> Tensor:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        device = accelerator_of(tensors) or torch.device("cpu")
        payload = Checks.payload(self.nbytes(shapes), device)
        size = self.codec.nbytes(shapes[: -self.count])
        payload[:size] = packed(self.codec, list(tensors[: -self.count]), checks)
        payload[padded(size) :] = packed(FLOAT32, list(tensors[-self.count :]), checks)
        return payload

    def decode(self, payload: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        if payload.numel() != self.nbytes(shapes):
            raise ValueError(
                f"payload has {payload.numel()} bytes, these shapes need {self.nbytes(shapes)} in "
                f"{self.name}"
            )
        return self.unpacked(payload, shapes, Checks(later=False))

    def unpacked(self, payload: Tensor, shapes: Sequence[Shape], checks: Checks) -> list[Tensor]:
        head, tail = self._cut(shapes)
        size = self.codec.nbytes(head)
        parts = unpacked(self.codec, payload[:size], head, checks)
        return parts + FLOAT32.decode(payload[padded(size) :].clone(), tail)

    def fresh(self) -> BufferTailCodec:
        return BufferTailCodec(self.codec.fresh(), self.count)

    def state_dict(self) -> dict[str, Any]:
        return self.codec.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.codec.load_state_dict(state_dict)

    def _cut(self, shapes: Sequence[Shape]) -> tuple[Sequence[Shape], Sequence[Shape]]:
        return shapes[: -self.count], shapes[-self.count :]
