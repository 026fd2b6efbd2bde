"""The codec of the compressed butterfly: contributions by one codec, averages back by another.

    codec = codec_named("sign+ef,back=sign+ef")
    payload = codec.encode(tensors)
    part = codec.cut(payload, shapes, share)           # what the owner of ``share`` is sent
    average = codec.average(share, means)              # there: average.payload goes to all
    codec.keep(average)                                # once the round has counted

How a round goes, and which codecs fit: docs/internals.md, "The compressed butterfly".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from shoal.optim.codecs.base import Codec, Shape, check_finite, padded
from shoal.optim.codecs.error_feedback import ErrorFeedback
from shoal.optim.codecs.slices import Share

SEPARATOR = ",back="
"""In a name, between the codecs of the two ways."""
UP = ("sign", "e3m0", "int8")
"""Codecs of contributions, each with error feedback: payloads that can be cut at blocks."""
BACK = ("float32", "bfloat16", "float16", "int8", "e3m0", "sign", "auto:BITS")
"""Codecs of averages; those that are too lossy for whole weights with error feedback only."""


@runtime_checkable
class Cuttable(Protocol):
    """Codec whose payloads can be cut at multiples of `shoal.optim.codecs.slices.BLOCK`."""

    def section(self, shape: Shape) -> int:
        """Return the bytes that a tensor of this shape needs, without the gap behind it."""
        ...

    def fields(self, section: Tensor, count: int, start: int, stop: int) -> list[Tensor]:
        """Return what a tensor's section holds of the values ``start`` to ``stop`` of ``count``.

        Each field, joined with those of the ranges that follow, is that of one tensor of these
        values.
        """
        ...


@dataclass(frozen=True)
class Average:
    """What an owner sends back of its share, until the round has counted."""

    share: Share
    payload: Tensor
    back: Codec
    """The codec of the way back as it is if this counts."""


class TwoWayCodec(ErrorFeedback):
    """Codec with error feedback for contributions, and ``back`` for the averages of what is sent.

    Each member averages its share for all, adds what earlier averages of it have lost (``owed``),
    and encodes the sum by ``back``. Where a contribution is gathered whole instead, this is
    ``ErrorFeedback``, with the same payload.

    Raises:
        ValueError: a codec cannot be used on its way.
    """

    residuals = 2

    def __init__(self, codec: Codec, beta: float, back: Codec) -> None:
        super().__init__(codec, beta)
        if codec.name not in UP:
            raise ValueError(
                f"averages cannot be sent back by a codec of their own where contributions are "
                f"sent by {codec.name}: choose {', '.join(f'{name}+ef' for name in UP)}, or leave "
                "out the codec of the way back"
            )
        check_back(back)
        self.back = back
        self.owed: list[Tensor] | None = None
        """What the averages of this peer's share have lost, 0 elsewhere, of the shapes of the last
        ``encode``; None: nothing yet.
        """

    @property
    def name(self) -> str:
        return f"{super().name}{SEPARATOR}{self.back.name}"

    def cut(self, payload: Tensor, shapes: Sequence[Shape], share: Share) -> Tensor:
        """Return the payload of ``share.take(tensors)``, of that of all tensors."""
        codec = self.codec
        assert isinstance(codec, Cuttable)
        starts = [0]
        for shape in shapes:
            starts.append(starts[-1] + padded(codec.section(shape)))
        cut = torch.zeros(self.nbytes(share.shapes), dtype=torch.uint8, device=payload.device)
        offset = 0
        for (place, ranges), shape in zip(share.ranges, share.shapes, strict=True):
            size = codec.section(shapes[place])
            section = payload[starts[place] : starts[place] + size]
            count = math.prod(shapes[place])
            each = [codec.fields(section, count, start, stop) for start, stop in ranges]
            fields = [torch.cat(parts) for parts in zip(*each, strict=True)]
            cut[offset : offset + codec.section(shape)] = torch.cat(fields)
            offset += padded(codec.section(shape))
        return cut

    @torch.no_grad()
    def average(self, share: Share, means: Sequence[Tensor]) -> Average:
        """Encode the averages of a share, with what is owed of it. Changes nothing yet.

        ValueError for NaN or infinity.
        """
        if not share.ranges:
            return Average(share, torch.zeros(0, dtype=torch.uint8, device="cpu"), self.back)
        back = self.back.fresh()
        back.load_state_dict(self.back.state_dict())
        if isinstance(back, ErrorFeedback) and self.owed is not None:
            back.error = share.take(self.owed)
        check_finite(means, "an average")
        return Average(share, back.encode(means), back)

    def keep(self, average: Average) -> None:
        """Note that an average has counted: what it has lost is owed from now on, and no more what
        was owed of other shares, which others average now.
        """
        self.back = average.back
        if not isinstance(self.back, ErrorFeedback):
            return
        lost = self.back.error or []
        self.back.error = None
        self.back.accepted()
        owed = [torch.zeros(tuple(e.shape), device="cpu") for e in self.error or []]
        average.share.put(owed, lost)
        self.owed = owed

    def decode_averages(self, payload: Tensor, share: Share) -> list[Tensor]:
        """Return the averages of a share. ValueError as ``decode``."""
        if not share.ranges and not payload.numel():
            return []
        return self.back.decode(payload, share.shapes)

    def average_nbytes(self, share: Share) -> int:
        """Return the exact size of the payload of the averages of a share."""
        return self.back.nbytes(share.shapes) if share.ranges else 0

    def fresh(self) -> TwoWayCodec:
        return TwoWayCodec(self.codec.fresh(), self.beta, self.back.fresh())

    @torch.no_grad()
    def state_dict(self, unsent: Sequence[Tensor] | None = None) -> dict[str, Any]:
        """Return that of ``ErrorFeedback``, with what is owed behind its residuals."""
        state = super().state_dict(unsent)
        error = state["error"]
        if error is not None:
            owed = self.owed or [torch.zeros(tuple(e.shape), device="cpu") for e in error]
            state["error"] = error + [tensor.clone() for tensor in owed]
        return {**state, "residuals": self.residuals, "back": self.back.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        both = state_dict.get("error")
        own = {**state_dict}
        owed: list[Tensor] | None = None
        if both is not None:
            half = len(both) // 2
            owed = [tensor.to("cpu", torch.float32, copy=True) for tensor in both[half:]]
            own["error"] = list(both[:half])
            if [t.shape for t in owed] != [t.shape for t in own["error"]]:
                raise ValueError(
                    f"the saved error feedback of {self.name} has not two tensors for each that is "
                    "sent"
                )
            check_finite(owed, "the saved error feedback")
        back = self.back.fresh()
        back.load_state_dict(state_dict.get("back", {}))
        super().load_state_dict(own)
        self.back = back
        self.owed = owed


def check_back(codec: Codec) -> None:
    """Raise ValueError unless averages can be sent back by ``codec``."""
    feeds_back = isinstance(codec, ErrorFeedback)
    inner = codec.codec if isinstance(codec, ErrorFeedback) else codec
    base = "auto:BITS" if inner.name.startswith("auto:") else inner.name
    if base not in BACK or two_way(codec) is not None:
        raise ValueError(
            f"averages cannot be sent back by {codec.name}: choose one of "
            f"{', '.join(BACK)}, with +ef below 8 bits"
        )
    if inner.displacement and not feeds_back:
        raise ValueError(
            f"averages sent back by {codec.name} would lose what it leaves out for good: choose "
            f"{codec.name}+ef"
        )


def named_two_way(name: str) -> bool:
    """Return whether a codec of that ``name`` is one for both ways (``two_way``)."""
    _, separator, back = name.partition(SEPARATOR)
    return bool(separator) and "," not in back


def two_way(codec: Codec) -> TwoWayCodec | None:
    """Return ``codec`` if averages may be sent back by a codec of their own, else None: with
    averaged buffers behind it whole contributions are gathered.
    """
    return codec if isinstance(codec, TwoWayCodec) else None
