"""The bytes of a contribution: encoded once, or made from the tensors chunk by chunk whenever they are read."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from shoal.optim.codecs.base import FLOAT32, Codec, FloatCodec, Shape, buffer
from shoal.optim.codecs.mod4 import PairMessage
from shoal.optim.exchange.on_demand import OnDemand, slabs
from shoal.swarm.wire.digest import CHUNK, chunks, digest


class Payload(Protocol):
    """Payload that is read from its beginning to its end, as often as wanted, also by several readers at once."""

    @property
    def nbytes(self) -> int: ...

    def blocks(self) -> Iterator[memoryview]:
        """Return its chunks of 1 MiB, the last shorter."""
        ...

    def whole(self) -> Tensor:
        """Return all bytes as one flat tensor, which nobody may change."""
        ...

    def tensors(self) -> Sequence[Tensor]:
        """Return what the others decode, float32; `OnDemand`, or tensors that may be views into the payload."""
        ...


class EncodedPayload:
    """Payload that ``codec`` has made of tensors of ``shapes``."""

    def __init__(self, payload: Tensor, codec: Codec, shapes: Sequence[Shape]) -> None:
        self._payload, self._codec, self._shapes = payload, codec, shapes

    @property
    def nbytes(self) -> int:
        return self._payload.numel()

    def blocks(self) -> Iterator[memoryview]:
        return chunks(self._payload.numpy().data)

    def whole(self) -> Tensor:
        return self._payload

    def tensors(self) -> Sequence[Tensor]:
        return self._codec.decode(self._payload, self._shapes)


class PairPayload(EncodedPayload):
    """Payload that a partner reads by its own weights, as ``message`` reads the partner's."""

    def __init__(self, message: PairMessage, codec: Codec) -> None:
        super().__init__(message.payload, codec, message.shapes)
        self.message = message

    def tensors(self) -> Sequence[Tensor]:
        return self.message.tensors()


class BorrowedPayload:
    """Payload of plain floats that is made from ``tensors`` (on the CPU) as it is read, so nothing of their size is held.

    The tensors must not change while it is in use.

    Raises:
        ValueError: a finite value is too large for the codec.
    """

    def __init__(self, tensors: OnDemand, codec: FloatCodec) -> None:
        self._tensors, self._dtype = tensors.rounded(codec.dtype), codec.dtype
        self._ends = list(itertools.accumulate(math.prod(shape) for shape in tensors.shapes))
        if codec.dtype != torch.float32:
            for place, start, stop in slabs(tensors):
                codec.check_range([tensors.values(place, start, stop)])

    @property
    def nbytes(self) -> int:
        return self._ends[-1] * self._dtype.itemsize if self._ends else 0

    def blocks(self) -> Iterator[memoryview]:
        step = CHUNK // self._dtype.itemsize
        for start in range(0, self.nbytes // self._dtype.itemsize, step):
            yield self._made(start, min(start + step, self._ends[-1])).view(torch.uint8).numpy().data

    def whole(self) -> Tensor:
        """Return a copy of everything."""
        flat = buffer(self.nbytes)
        data, offset = flat.numpy().data, 0
        for block in self.blocks():
            data[offset : offset + len(block)] = block
            offset += len(block)
        return flat

    def tensors(self) -> OnDemand:
        return self._tensors

    def _made(self, start: int, stop: int) -> Tensor:
        """Return the values from ``start`` to ``stop`` of all tensors together; a view where they are of one tensor."""
        pieces, place = [], bisect_right(self._ends, start)
        while start < stop:
            before = self._ends[place - 1] if place else 0
            end = min(stop, self._ends[place])
            if end > start:
                pieces.append(self._tensors.values(place, start - before, end - before).to(self._dtype))
            start, place = end, place + 1
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def float32_digest(tensors: Sequence[Tensor]) -> bytes:
    """Return the digest that a contribution of ``tensors`` in float32 has, whatever their type and device, 32 bytes."""
    return digest(BorrowedPayload(OnDemand(tensors), FLOAT32).blocks())
