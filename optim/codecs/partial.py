"""Codecs that compress the matrices of a model and send all else whole.

    codec_named("sign+matrices+ef")   # vectors and single numbers in float32, all else by sign
    codec_named("sign+hidden+ef")     # embeddings and output layers in float32 too

Norms and biases are few. Embeddings are many: in a small model they are most of what ``+hidden``
sends. What the two cost and gain: docs/methods.md, "Codecs".
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from shoal.optim.codecs.base import NOT_FINITE, Codec, Shape, check_payload, padded
from shoal.optim.codecs.device_checks import Checks, encoded, finite, packed, unpacked
from shoal.optim.codecs.error_feedback import ErrorFeedback
from shoal.optim.codecs.floats import FLOAT32
from shoal.optim.device import accelerator_of, to_device

Scope = Literal["matrices", "hidden"]
"""What is compressed: all tensors of two dimensions or more, or those of hidden layers alone."""
MARK_BYTES = 4
"""Of the checksum that says which tensors of a payload are whole."""
T = TypeVar("T")


class PartialCodec:
    """Codec that sends some tensors by ``codec`` and the others whole, as float32.

    ``whole`` says which: a flag for each parameter of a fragment, in order, repeated where a method
    sends several tensors a parameter. Without it the shapes decide, and what has fewer than two
    dimensions is whole; an outer optimizer gives the flags (``bound``).

    A payload is that of ``codec`` for its tensors, zeros up to a multiple of 4 bytes, the whole
    tensors, and a CRC-32 of the flags, one byte each. A payload with other flags is refused, so
    peers whose models differ in kind, but not in names and shapes, do not mix their tensors.

    Raises:
        ValueError: when encoding or decoding, the tensors are no multiple of the flags.
    """

    def __init__(self, codec: Codec, scope: Scope, whole: Sequence[bool] | None = None) -> None:
        self.codec = codec
        self.scope: Scope = scope
        self.whole = None if whole is None else tuple(whole)

    @property
    def name(self) -> str:
        return f"{self.codec.name}+{self.scope}"

    @property
    def displacement(self) -> bool:
        return self.codec.displacement

    def flags(self, shapes: Sequence[Shape]) -> list[bool]:
        """Return for each tensor whether it is sent whole."""
        if self.whole is None:
            return [len(shape) < 2 for shape in shapes]
        times, rest = divmod(len(shapes), len(self.whole))
        if rest:
            raise ValueError(
                f"{self.name} knows {len(self.whole)} parameters and was given {len(shapes)} "
                "tensors: choose a codec without it for a method that sends no tensor a parameter"
            )
        return list(self.whole) * times

    def nbytes(self, shapes: Sequence[Shape]) -> int:
        cut, whole = _divided(shapes, self.flags(shapes))
        return padded(self.codec.nbytes(cut)) + FLOAT32.nbytes(whole) + MARK_BYTES

    def encode(self, tensors: Sequence[Tensor]) -> Tensor:
        """Encode. ValueError for NaN or infinity in what is whole, else as ``codec`` does."""
        return encoded(self, tensors)

    @torch.no_grad()
    def packed(self, tensors: Sequence[Tensor], checks: Checks) -> Tensor:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        flags = self.flags(shapes)
        cut, whole = _divided(tensors, flags)
        device = accelerator_of(tensors) or torch.device("cpu")
        payload = Checks.payload(self.nbytes(shapes), device)
        size = self.codec.nbytes([tuple(tensor.shape) for tensor in cut])
        payload[:size] = packed(self.codec, cut, checks)
        if whole:
            checks.require(finite(whole), f"a tensor to be sent {NOT_FINITE}")
            payload[padded(size) : -MARK_BYTES] = packed(FLOAT32, whole, checks)
        (mark,) = to_device([_mark(flags)], device)
        payload[-MARK_BYTES:] = mark
        return payload

    def decode(self, payload: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        payload = check_payload(payload, self.nbytes(shapes), self.name)
        if not torch.equal(payload[-MARK_BYTES:].cpu(), _mark(self.flags(shapes))):
            raise ValueError("the payload sends other tensors whole than this model does")
        return self.unpacked(payload, shapes, Checks(later=False))

    def unpacked(self, payload: Tensor, shapes: Sequence[Shape], checks: Checks) -> list[Tensor]:
        flags = self.flags(shapes)
        cut, whole = _divided(shapes, flags)
        size = self.codec.nbytes(cut)
        compressed = iter(unpacked(self.codec, payload[:size], cut, checks))
        # A copy, so that a residual made of it does not keep the payload.
        exact = iter(FLOAT32.decode(payload[padded(size) : -MARK_BYTES].clone(), whole))
        return [next(exact if flag else compressed) for flag in flags]

    def fresh(self) -> PartialCodec:
        return PartialCodec(self.codec.fresh(), self.scope, self.whole)

    def state_dict(self) -> dict[str, Any]:
        return self.codec.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.codec.load_state_dict(state_dict)


def _divided(items: Iterable[T], flags: Sequence[bool]) -> tuple[list[T], list[T]]:
    """Return the items that are compressed, and those that are whole."""
    cut: list[T] = []
    whole: list[T] = []
    for item, flag in zip(items, flags, strict=True):
        (whole if flag else cut).append(item)
    return cut, whole


def _mark(flags: Sequence[bool]) -> Tensor:
    checksum = zlib.crc32(bytes(flags)).to_bytes(MARK_BYTES, "little")
    return torch.tensor(list(checksum), dtype=torch.uint8, device="cpu")


def scope_of(codec: Codec) -> Scope | None:
    """Return what ``codec`` compresses if it sends the rest whole, else None."""
    if isinstance(codec, ErrorFeedback):
        codec = codec.codec
    return codec.scope if isinstance(codec, PartialCodec) else None


def sent_whole(scope: Scope, shapes: Sequence[Shape], not_hidden: Collection[int]) -> list[bool]:
    """Return for each parameter whether a codec of that scope sends it whole.

    ``not_hidden``: positions of embeddings and output layers, which count with +hidden only.
    """
    exempt = not_hidden if scope == "hidden" else ()
    return [len(shape) < 2 or index in exempt for index, shape in enumerate(shapes)]


def check_can_divide(codec: Codec, method: str) -> None:
    """Raise ValueError if ``codec`` sends some tensors whole; called for a method whose
    contribution is one tensor of values of all parameters.
    """
    scope = scope_of(codec)
    if scope is not None:
        raise ValueError(
            f"{method} sends chosen values of all parameters as one tensor, of which none can be "
            f"whole: choose the codec without +{scope}"
        )


def bound(codec: Codec, whole: Sequence[bool]) -> Codec:
    """Return ``codec`` for parameters of which those are ``whole``, without its state; itself if it
    compresses all alike.
    """
    if isinstance(codec, ErrorFeedback):
        inner = bound(codec.codec, whole)
        return codec if inner is codec.codec else ErrorFeedback(inner, codec.beta)
    if isinstance(codec, PartialCodec):
        return PartialCodec(codec.codec.fresh(), codec.scope, whole)
    return codec
