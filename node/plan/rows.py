"""Every method and codec that fits, with what to expect of it over a link
(`shoal.swarm.exchange.cost`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.optim.methods import METHODS, Method
from shoal.swarm.exchange.cost import (
    AVERAGED,
    GOOD,
    Forecast,
    Line,
    Work,
    forecast,
    per_param_step,
    times_fewer,
)
from shoal.swarm.settings.outer import OuterSettings

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.optim.codecs.base import Codec, Shape

CODECS = ("float32", "bfloat16", "int8", "mod4", "e3m0+ef", "sign+ef")
FIXED_BYTES = 40e6
"""What a node takes beyond training alone whatever its model."""
MEMORY_SOURCE = "bench/memory.py, two nodes in float32 (docs/benchmarks.md, Memory)"
COPIED = ("method", "every", "lr", "momentum", "fragments", "lag", "codec", "codec_back")
BACK = ("e3m0+ef", "sign+ef")
"""Codecs of averages that are shown, where contributions are sent in one bit."""


@dataclass(frozen=True)
class ModelTensors:
    """The averaged tensors of a model, as far as the bytes of a round depend on them."""

    shapes: tuple[Shape, ...]
    not_hidden: frozenset[int] = frozenset()
    """Positions of embeddings and output layers, which a codec with +hidden sends whole."""

    @classmethod
    def of(cls, params: Sequence[Tensor], model: nn.Module) -> ModelTensors:
        """Return those of ``model`` of which ``params`` are averaged."""
        from shoal.optim.layers import embeddings_and_outputs

        shapes = tuple(tuple(tensor.shape) for tensor in params)
        found = embeddings_and_outputs(model)
        return cls(shapes, frozenset(n for n, tensor in enumerate(params) if tensor in found))

    @classmethod
    def of_count(cls, params: int) -> ModelTensors:
        """Return what stands for a model of which only the number of values is known.

        It is one matrix of a hidden layer: what ``+matrices`` and ``+hidden`` send whole comes on
        top.
        """
        return cls(((params, 1),))

    @property
    def params(self) -> int:
        """The number of values."""
        return sum(math.prod(shape) for shape in self.shapes)

    def sent(self, method: Method, *, weighted: bool) -> list[Shape]:
        """Return the shapes of what a peer sends in a round."""
        if method.mixes:
            return [(min(round(self.params * method.knobs["part"]), self.params),)]
        shapes = list(self.shapes)
        if method.doubles and weighted:
            shapes += self.shapes
        if method.scales:
            shapes += [()] * len(self.shapes)
        return shapes

    def codec(self, codec: Codec) -> Codec:
        """Return ``codec`` as it sends these tensors, of which it may exempt some."""
        from shoal.optim.codecs.partial import bound, scope_of, sent_whole

        scope = scope_of(codec)
        if scope is None:
            return codec
        return bound(codec, sent_whole(scope, self.shapes, self.not_hidden))


@dataclass(frozen=True)
class Row:
    """One choice of settings, and what to expect of it."""

    outer: OuterSettings
    """With all defaults written out."""
    tensors: ModelTensors
    work: Work
    forecast: Forecast

    @property
    def memory(self) -> float | None:
        """Bytes beyond training alone, if they were measured with this method; mod4, which keeps
        what it sent, was not.
        """
        if self.outer.codec == "mod4":
            return None
        overlapped = bool(self.work.lag)
        return memory_of(self.outer.method, self.tensors.params, overlapped=overlapped)

    @property
    def blocks(self) -> bool:
        """Whether training waits for each exchange though the method could overlap them."""
        return self.work.lag == 0 and self.work.group == "pair"

    def toml(self) -> str:
        """Return the settings as a file that `shoal up` takes."""
        lines = ["[outer]"]
        for key in COPIED:
            value = getattr(self.outer, key)
            if value is not None:
                lines.append(f"{key} = {json.dumps(value)}")
        if self.outer.round != "steps":
            lines.append(f"round = {json.dumps(self.outer.round)}")
        return "\n".join(lines) + "\n"

    def json(self) -> dict[str, Any]:
        """Return the row as plain values: seconds, and bytes that leave a node.

        ``times_fewer``: than in an all-reduce of float32 gradients at every step.
        """
        found = self.forecast
        params = self.tensors.params
        return {
            "method": self.outer.method,
            "codec": self.outer.codec_name,
            "every": self.work.every,
            "fragments": self.work.fragments,
            "lag": self.work.lag,
            "expected_lag": found.lag,
            "utilisation": round(found.utilisation, 4),
            "exchange_s": round(found.exchange_s, 3),
            "bytes_a_round": found.sent,
            "bytes_a_day": round(found.sent_a_day),
            "bytes_per_param_step": per_param_step(self.work, params),
            "times_fewer": times_fewer(self.work, params),
            "link_filled": round(found.filled, 4),
            "memory_bytes": self.memory,
            "settings": self.toml(),
        }


def memory_of(method: str, params: int, *, overlapped: bool) -> float | None:
    """Return the bytes that averaging takes beyond training alone, if they were measured with this
    method.
    """
    each = METHODS[method].memory.measured[overlapped]
    return None if each is None else FIXED_BYTES + each * params


def work_of(outer: OuterSettings, tensors: ModelTensors, *, peers: int, step_s: float) -> Work:
    """Return what a node does in a round with these settings.

    ``tensors``: what is averaged; ``step_s``: seconds a step. The payload is that of the model as
    one; cut into fragments it is longer by some bytes each.
    """
    from shoal.optim import codec_named
    from shoal.optim.codecs.floats import FloatCodec
    from shoal.optim.codecs.two_way import two_way

    outer = outer.resolved()
    method = outer.row
    codec = codec_named(outer.codec_name)
    both_ways = two_way(codec)
    every = outer.every or 1
    sent = tensors.sent(method, weighted=outer.weights != "equal")
    return Work(
        group=method.group,
        nbytes=tensors.codec(codec).nbytes(sent),
        params=sum(math.prod(shape) for shape in sent),
        peers=peers,
        every=every,
        step_s=step_s,
        fragments=min(outer.fragments or 1, every),
        lag=every if method.schedule == "delayed" else outer.lag or 0,
        sums=isinstance(codec, FloatCodec) and outer.robust == "none",
        back=0 if both_ways is None else both_ways.back.nbytes(sent),
    )


def row_of(
    outer: OuterSettings, line: Line, tensors: ModelTensors, *, peers: int, step_s: float
) -> Row:
    """Return what to expect of these settings over a link."""
    work = work_of(outer, tensors, peers=peers, step_s=step_s)
    return Row(outer.resolved(), tensors, work, forecast(work, line))


def choices(every: int | None = None) -> Iterator[OuterSettings]:
    """Yield the settings of each method and codec that fit, overlapped where the method can, for
    pairs also blocking, and for some groups with averages back in few bits.
    """
    from shoal.optim import codec_named

    for method in METHODS.values():
        if method.group == "nobody":
            continue
        names = CODECS if method.codec in CODECS else (method.codec,)
        for name in names:
            try:
                method.check_codec(codec_named(name))
            except ValueError:
                continue
            for lag in _lags(method):
                given = {"method": method.name, "codec": name, "every": every, "lag": lag}
                yield OuterSettings.model_validate(given)
                for back in _ways_back(method, name):
                    yield OuterSettings.model_validate({**given, "codec_back": back})


def _ways_back(method: Method, codec: str) -> tuple[str, ...]:
    """Return the codecs of averages that are shown beside gathering."""
    if method.group != "everyone" or method.experimental or codec != "sign+ef":
        return ()
    return BACK


def _lags(method: Method) -> list[str | int | None]:
    if method.schedule != "overlaps":
        return [None]
    if method.group == "pair":
        return ["auto", 0]
    return ["auto"]


def rows(
    line: Line, tensors: ModelTensors, *, peers: int, step_s: float, every: int | None = None
) -> list[Row]:
    """Return all choices: those that compute nearly always first, by bytes; then the others, by how
    much they compute.
    """
    made = []
    for outer in choices(every):
        # Two peers gather all the same.
        if not outer.codec_back or peers >= AVERAGED:
            made.append(row_of(outer, line, tensors, peers=peers, step_s=step_s))

    def order(row: Row) -> tuple[bool, float]:
        good = row.forecast.utilisation >= GOOD
        return not good, row.forecast.sent_a_day if good else -row.forecast.utilisation

    return sorted(made, key=order)
