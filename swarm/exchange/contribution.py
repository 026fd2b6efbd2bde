"""One peer's contribution to one round."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.optim.codecs.base import Codec, FloatCodec, Shape
from shoal.optim.codecs.mod4 import PairMessage, for_pairs
from shoal.optim.exchange.base import RoundKey
from shoal.optim.exchange.on_demand import OnDemand
from shoal.swarm.exchange.payload import BorrowedPayload, EncodedPayload, PairPayload, Payload
from shoal.swarm.wire.digest import digest
from shoal.swarm.wire.fields import MAX_WEIGHT, Sketch
from shoal.swarm.wire.pair import MAX_REFUSED, Offer

BARRED = "this node has banned its caller for a while, for what it said in verification"


@dataclass(frozen=True)
class Contribution:
    """A contribution: ``payload`` is what ``codec`` makes of tensors of ``shapes``; ``sha256`` is its digest."""

    key: RoundKey
    payload: Payload
    shapes: tuple[Shape, ...]
    codec: Codec
    weight: float
    sha256: bytes
    even: int = 0
    """How many of the first tensors get a plain mean, whatever the weights; the same at all peers of the method."""
    sketch: Sketch | None = None
    """Of the slow weights after the round that this node finished last."""

    def tensors(self) -> Sequence[Tensor]:
        return self.payload.tensors()

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


def encode_contribution(
    swarm: str, key: RoundKey, tensors: Sequence[Tensor], weight: float, codec: Codec, even: int = 0
) -> Contribution:
    """Encode ``tensors``; those that are `OnDemand` are borrowed where the codec allows it.

    Raises:
        ValueError: ``key`` is of another run than ``swarm``, or the codec refuses the tensors.
    """
    if key.run != swarm:
        raise ValueError(f"this exchange belongs to swarm {swarm}, the round to run {key.run}")
    shapes = tuple(tensors.shapes if isinstance(tensors, OnDemand) else (tuple(tensor.shape) for tensor in tensors))
    payload: Payload
    if isinstance(tensors, OnDemand) and isinstance(codec, FloatCodec) and tensors.on_cpu:
        payload = BorrowedPayload(tensors, codec)
    elif (pairs := for_pairs(codec)) is not None:
        message = pairs[0].post(tensors, pairs[1])
        if len(message.own) > 8 * MAX_REFUSED:
            raise ValueError(f"{codec.name} cannot send {message.own.numel()} values at once: set more outer.fragments")
        payload = PairPayload(message, codec)
    else:
        payload = EncodedPayload(codec.encode([tensor.float() for tensor in tensors]), codec, shapes)
    return Contribution(key, payload, shapes, codec, min(float(weight), MAX_WEIGHT), digest(payload.blocks()), even)


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
