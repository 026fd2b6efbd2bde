"""One peer's contribution to a round and its bytes: encoded once, or made from the tensors chunk by chunk as they are read."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.optim.codecs.base import FLOAT32, Codec, FloatCodec, Shape, buffer
from shoal.optim.codecs.mod4 import PairMessage, for_pairs
from shoal.optim.exchange.base import Contribution, OnDemand, RoundKey, slabs
from shoal.swarm.wire.envelope import CHUNK, MAX_WEIGHT, Sketch, chunks, digest
from shoal.swarm.wire.messages import MAX_REFUSED, Offer


class Payload(ABC):
    """Payload that is read from its beginning to its end, as often as wanted, also by several readers at once."""

    @property
    @abstractmethod
    def nbytes(self) -> int: ...

    @functools.cached_property
    def sha256(self) -> bytes:
        """The digest of its chunks."""
        return digest(self.blocks())

    @abstractmethod
    def blocks(self) -> Iterator[memoryview]:
        """Return its chunks of 1 MiB, the last shorter."""

    @abstractmethod
    def whole(self) -> Tensor:
        """Return all bytes as one flat tensor, which nobody may change."""

    @abstractmethod
    def tensors(self) -> Sequence[Tensor]:
        """Return what the others decode, float32; `OnDemand`, or tensors that may be views into the payload."""


class EncodedPayload(Payload):
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


class PairPayload(Payload):
    """Payload that a partner reads by its own weights, as ``message`` reads the partner's. It is written when it is first read."""

    def __init__(self, message: PairMessage) -> None:
        self.message = message

    @property
    def nbytes(self) -> int:
        return self.message.nbytes

    def blocks(self) -> Iterator[memoryview]:
        return chunks(self.message.payload.numpy().data)

    def whole(self) -> Tensor:
        return self.message.payload

    def tensors(self) -> Sequence[Tensor]:
        return self.message.tensors()


class BorrowedPayload(Payload):
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


BARRED = "this node has banned its caller for a while, for what it said in verification"


@dataclass(frozen=True)
class EncodedContribution:
    """A contribution as it is sent: ``payload`` is what ``codec`` makes of tensors of ``shapes``."""

    key: RoundKey
    payload: Payload
    shapes: tuple[Shape, ...]
    codec: Codec
    weight: float
    even: int = 0
    """How many of the first tensors get a plain mean, whatever the weights; the same at all peers of the method."""
    sketch: Sketch | None = None
    """Of the slow weights after the round that this node finished last."""

    def tensors(self) -> Sequence[Tensor]:
        return self.payload.tensors()

    @property
    def sha256(self) -> bytes:
        return self.payload.sha256

    def prepared(self) -> EncodedContribution:
        """Write and digest what is to be sent, and return this. Slow."""
        assert self.sha256
        return self

    @property
    def message(self) -> PairMessage | None:
        """What reads the partner's contribution, if the codec is one for pairs."""
        return self.payload.message if isinstance(self.payload, PairPayload) else None

    def differs(self, theirs: Offer) -> str | None:
        """Return the reason why this cannot be averaged with the offered contribution, or None."""
        if theirs.codec != self.codec.name:
            return f"the codec is {self.codec.name} here and {theirs.codec} there"
        if theirs.fragment != self.key.fragment:
            return f"the fragment is {self.key.fragment} here and {theirs.fragment} there"
        reason = shapes_differ(self.shapes, theirs.shapes)
        if reason is None and theirs.nbytes != self.payload.nbytes:
            reason = f"the payload has {self.payload.nbytes} bytes here and {theirs.nbytes} there"
        return reason


def encode_contribution(swarm: str, contribution: Contribution) -> EncodedContribution:
    """Encode a contribution, of which tensors that are `OnDemand` are borrowed where the codec allows it.

    Raises:
        ValueError: it is of another run than ``swarm``, or the codec refuses the tensors.
    """
    key, tensors, codec = contribution.key, contribution.tensors, contribution.codec
    if key.run != swarm:
        raise ValueError(f"this exchange belongs to swarm {swarm}, the round to run {key.run}")
    shapes = tuple(tensors.shapes if isinstance(tensors, OnDemand) else (tuple(tensor.shape) for tensor in tensors))
    payload: Payload
    if isinstance(tensors, OnDemand) and isinstance(codec, FloatCodec) and tensors.on_cpu:
        payload = BorrowedPayload(tensors, codec)
    elif (pairs := for_pairs(codec)) is not None:
        message = pairs[0].post(tensors if isinstance(tensors, OnDemand) else [tensor.clone() for tensor in tensors], pairs[1])
        if len(message.own) > 8 * MAX_REFUSED:
            raise ValueError(f"{codec.name} cannot send {len(message.own)} blocks of 64 values at once: set more outer.fragments")
        payload = PairPayload(message)
    else:
        payload = EncodedPayload(codec.encode([tensor.float() for tensor in tensors]), codec, shapes)
    weight = min(float(contribution.weight), MAX_WEIGHT)
    return EncodedContribution(key, payload, shapes, codec, weight, contribution.even)


def model_digest(tensors: Sequence[Tensor]) -> str:
    """Return the hex SHA-256 of the tensors' types and shapes. Peers average only if theirs are equal."""
    return parameters_digest((tensor.dtype, tensor.shape) for tensor in tensors)


def parameters_digest(parameters: Iterable[tuple[torch.dtype, Sequence[int]]]) -> str:
    """Return the `model_digest` of parameters of which only type and shape are known."""
    return hashlib.sha256(";".join(f"{dtype}{list(shape)}" for dtype, shape in parameters).encode()).hexdigest()


def shapes_differ(mine: tuple[Shape, ...], theirs: tuple[Shape, ...]) -> str | None:
    """Return the first difference between two lists of shapes, in words, or None."""
    if len(mine) != len(theirs):
        return f"the model has {len(mine)} tensors here and {len(theirs)} there"
    for number, (here, there) in enumerate(zip(mine, theirs, strict=True)):
        if here != there:
            return f"tensor {number} has shape {list(here)} here and {list(there)} there"
    return None
