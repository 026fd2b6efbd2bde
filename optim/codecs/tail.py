"""The codec for averaged buffers: BatchNorm's statistics follow the parameters in a contribution, in full precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.optim.codecs.base import FLOAT32, Checks, Codec, Packs, Shape
from shoal.optim.device import accelerator_of


@dataclass(frozen=True)
class BufferTailCodec:
    """Codec that sends the last ``count`` tensors as float32, since running statistics stand no loss, and the rest by ``codec``."""

    codec: Codec
    count: int

    @property
    def name(self) -> str:
        """Both codecs' names, since both partners must send the same tail."""
        return f"{self.codec.name},{self.count}xfloat32"

    @property
    def displacement(self) -> bool:
        """The head codec's value."""
        return self.codec.displacement

    def nbytes(self, shapes: Sequence[Shape]) -> int:
        head, tail = self._cut(shapes)
        return self._room(head) + FLOAT32.nbytes(tail)

    def encode(self, tensors: Sequence[Tensor]) -> Tensor:
        """Encode the head, zeros up to a multiple of 4 bytes, and the tail."""
        if accelerator_of(tensors) is not None and isinstance(self.codec, Packs):
            checks = Checks()
            return checks.read(self.packed(tensors, checks))
        head, tail = list(tensors[: -self.count]), list(tensors[-self.count :])
        payload = self.codec.encode(head)
        gap = payload.new_zeros(self._room([tuple(tensor.shape) for tensor in head]) - payload.numel())
        return torch.cat([payload, gap, FLOAT32.encode(tail)])

    def packed(self, tensors: Sequence[Tensor], checks: Checks) -> Tensor:
        """Encode on the tensors' device. Only for a head's codec that does."""
        assert isinstance(self.codec, Packs)
        head, tail = list(tensors[: -self.count]), list(tensors[-self.count :])
        shapes = [tuple(tensor.shape) for tensor in head]
        payload = Checks.payload(self.nbytes([tuple(tensor.shape) for tensor in tensors]), tensors[0].device)
        payload[: self.codec.nbytes(shapes)] = self.codec.packed(head, checks)
        payload[self._room(shapes) :] = FLOAT32.packed(tail, checks)
        return payload

    def unpacked(self, payload: Tensor, shapes: Sequence[Shape], checks: Checks) -> list[Tensor]:
        """Decode head and tail of a payload of one's own."""
        assert isinstance(self.codec, Packs)
        head, tail = self._cut(shapes)
        parts = self.codec.unpacked(payload[: self.codec.nbytes(head)], head, checks)
        return parts + FLOAT32.decode(payload[self._room(head) :].clone(), tail)

    def decode(self, payload: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        """Decode head and tail. ValueError if the size is wrong."""
        if payload.numel() != self.nbytes(shapes):
            raise ValueError(f"payload has {payload.numel()} bytes, these shapes need {self.nbytes(shapes)} in {self.name}")
        head, tail = self._cut(shapes)
        parts = self.codec.decode(payload[: self.codec.nbytes(head)], head)
        return parts + FLOAT32.decode(payload[self._room(head) :].clone(), tail)

    def fresh(self) -> BufferTailCodec:
        return BufferTailCodec(self.codec.fresh(), self.count)

    def state_dict(self) -> dict[str, Any]:
        return self.codec.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the head's codec."""
        self.codec.load_state_dict(state_dict)

    def _cut(self, shapes: Sequence[Shape]) -> tuple[Sequence[Shape], Sequence[Shape]]:
        return shapes[: -self.count], shapes[-self.count :]

    def _room(self, head: Sequence[Shape]) -> int:
        return (self.codec.nbytes(head) + 3) // 4 * 4
