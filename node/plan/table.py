"""Every method and codec that fits, with what to expect of it over a link (`shoal.swarm.exchange.cost`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shoal.swarm.exchange.cost import GOOD, Forecast, Line, Work, forecast
from shoal.swarm.manifest.outer import OuterSettings

CODECS = ("float32", "bfloat16", "int8", "e3m0+ef", "sign+ef")
DELAYED = ("eager", "co2")
"""Methods that apply a mean a whole round after it was sent."""
FIXED_BYTES = 40e6
"""What a node takes beyond training alone whatever its model."""
WAITING = {"noloco": 12.3, "diloco": 12.4}
OVERLAPPED = {"noloco": 13.9, "streaming": 12.3, "co2": 28.0}
"""Main memory of a node beyond model, gradients, inner optimizer and ``FIXED_BYTES``, in bytes a parameter, where it was measured:
with lag 0, and where a mean is applied later, by the lag that nodes find."""
MEMORY_SOURCE = "bench/memory.py, two nodes in float32 (docs/benchmarks.md, Memory)"
COPIED = ("method", "every", "fragments", "lag", "codec")


@dataclass(frozen=True)
class Row:
    """One choice of settings, and what to expect of it."""

    outer: OuterSettings
    """With all defaults written out."""
    params: int
    work: Work
    forecast: Forecast

    @property
    def memory(self) -> float | None:
        """Bytes beyond training alone, if they were measured with this method."""
        return memory_of(self.outer.method, self.params, overlapped=bool(self.work.lag))

    @property
    def blocks(self) -> bool:
        """Whether training waits for each exchange though the method could overlap them."""
        return self.work.lag == 0 and self.work.group == "pair"

    def toml(self) -> str:
        """Return the settings as a file that `shoal up` takes."""
        lines = [f"{key} = {_literal(value)}" for key in COPIED if (value := getattr(self.outer, key)) is not None]
        return "\n".join(["[outer]", *lines]) + "\n"

    def json(self) -> dict[str, Any]:
        """Return the row as plain values: seconds and bytes."""
        found = self.forecast
        return {
            "method": self.outer.method,
            "codec": self.outer.codec,
            "every": self.work.every,
            "fragments": self.work.fragments,
            "lag": self.work.lag,
            "expected_lag": found.lag,
            "utilisation": round(found.utilisation, 4),
            "exchange_s": round(found.exchange_s, 3),
            "bytes_a_round": found.sent,
            "bytes_a_day": round(found.sent_a_day),
            "link_filled": round(found.filled, 4),
            "memory_bytes": self.memory,
            "settings": self.toml(),
        }


def _literal(value: int | str) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def memory_of(method: str, params: int, *, overlapped: bool) -> float | None:
    """Return the bytes that averaging takes beyond training alone, if they were measured with this method."""
    each = (OVERLAPPED if overlapped else WAITING).get(method)
    return None if each is None else FIXED_BYTES + each * params


def work_of(outer: OuterSettings, *, params: int, peers: int, step_s: float) -> Work:
    """Return what a node does in a round with these settings. ``params``: values that are averaged; ``step_s``: seconds a step."""
    from shoal.optim import codec_named, method_named
    from shoal.optim.codecs.base import FloatCodec

    outer = outer.resolved()
    method, codec = method_named(outer.method), codec_named(str(outer.codec))
    every = outer.every or 1
    count = math.ceil(params * (1.0 if outer.part is None else outer.part))
    # Two tensors in place of one: weighted pseudo-gradients, and slow weights that are never weighted (`NoLoCoRule`).
    apart = outer.method == "noloco" and outer.pull not in (None, outer.lr)
    both = method.group == "pair" and (outer.weights != "equal" or apart) and outer.method != "gasloc"
    return Work(
        group=method.group,
        nbytes=codec.nbytes([(count,)]) * (2 if both else 1),
        params=count * (2 if both else 1),
        peers=peers,
        every=every,
        step_s=step_s,
        fragments=min(outer.fragments or 1, every),
        lag=every if outer.method in DELAYED else outer.lag or 0,
        sums=isinstance(codec, FloatCodec) and outer.robust == "none",
        max_group=outer.max_group,
    )


def choices(every: int | None = None) -> Iterator[OuterSettings]:
    """Yield the settings of each method and codec that fit, overlapped where the method can, and for pairs also blocking."""
    from shoal.optim import METHODS, codec_named

    for method in METHODS.values():
        if method.group == "nobody":
            continue
        for name in (method.codec.name,) if method.codec.name not in CODECS else CODECS:
            if method.sends == "weights" and codec_named(name).displacement:
                continue
            lags = [None] if "lag" not in method.knobs else ["auto", 0] if method.group == "pair" else ["auto"]
            for lag in lags:
                given = {"method": method.name, "codec": name, "every": every, "lag": lag}
                yield OuterSettings.model_validate(given)


def rows(line: Line, *, params: int, peers: int, step_s: float, every: int | None = None) -> list[Row]:
    """Return all choices: those that compute nearly always first, by bytes; then the others, by how much they compute."""
    made = []
    for outer in choices(every):
        work = work_of(outer, params=params, peers=peers, step_s=step_s)
        made.append(Row(outer.resolved(), params, work, forecast(work, line)))

    def order(row: Row) -> tuple[bool, float]:
        good = row.forecast.utilisation >= GOOD
        return not good, row.forecast.sent_a_day if good else -row.forecast.utilisation

    return sorted(made, key=order)
