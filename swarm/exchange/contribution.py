"""One peer's contribution to one round."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.optim.codecs.base import Codec, Shape
from shoal.optim.exchange.base import RoundKey
from shoal.swarm.wire.digest import digest
from shoal.swarm.wire.pair import Offer

BARRED = "this node has banned its caller for a while, for what it said in verification"


@dataclass(frozen=True)
class Contribution:
    """An encoded contribution: ``payload`` (uint8) is made by ``codec`` from tensors of ``shapes``; ``sha256`` is its digest."""

    key: RoundKey
    payload: Tensor
    shapes: tuple[Shape, ...]
    codec: Codec
    weight: float
    sha256: bytes
    even: int = 0
    """How many of the first tensors get a plain mean, whatever the weights; the same at all peers of the method."""

    def view(self) -> memoryview:
        """Return the payload's bytes without a copy."""
        return self.payload.numpy().data

    def tensors(self) -> list[Tensor]:
        """Decode the payload, as the others do. The tensors may be views into it."""
        return self.codec.decode(self.payload, self.shapes)

    def differs(self, theirs: Offer) -> str | None:
        """Return the reason why this cannot be averaged with the offered contribution, or None."""
        if theirs.codec != self.codec.name:
            return f"the codec is {self.codec.name} here and {theirs.codec} there"
        if theirs.fragment != self.key.fragment:
            return f"the fragment is {self.key.fragment} here and {theirs.fragment} there"
        reason = shapes_differ(self.shapes, theirs.shapes)
        if reason is None and theirs.nbytes != self.payload.numel():
            reason = f"the payload has {self.payload.numel()} bytes here and {theirs.nbytes} there"
        return reason


def encode_contribution(
    swarm: str, key: RoundKey, tensors: Sequence[Tensor], weight: float, codec: Codec, even: int = 0
) -> Contribution:
    """Encode ``tensors``. Raises ValueError if ``key`` is of another run than ``swarm``, or if the codec refuses them."""
    if key.run != swarm:
        raise ValueError(f"this exchange belongs to swarm {swarm}, the round to run {key.run}")
    payload = codec.encode(tensors)
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    sha256 = digest(payload.numpy().data)
    return Contribution(key, payload, shapes, codec, float(weight), sha256, even)


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
