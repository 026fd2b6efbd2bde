"""Every method and codec that fits, with what to expect of it over a link
(`shoal.swarm.exchange.cost`).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shoal.optim.methods import METHODS, Method
from shoal.swarm.exchange.cost import GOOD, Forecast, Line, Work, forecast, least_every
from shoal.swarm.figures import amount, duration
from shoal.swarm.settings.outer import OuterSettings

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.optim.codecs.base import Codec, Shape

CODECS = ("float32", "bfloat16", "int8", "mod4", "e3m0+ef", "sign+ef")
FIXED_BYTES = 40e6
"""What a node takes beyond training alone whatever its model."""
MEMORY_SOURCE = "bench/memory.py, two nodes in float32 (docs/benchmarks.md, Memory)"
COPIED = ("method", "every", "fragments", "lag", "codec")


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
        return "\n".join(lines) + "\n"

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

    outer = outer.resolved()
    method = outer.row
    codec = codec_named(str(outer.codec))
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
    )


def choices(every: int | None = None) -> Iterator[OuterSettings]:
    """Yield the settings of each method and codec that fit, overlapped where the method can, and
    for pairs also blocking.
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
            lags: list[str | int | None] = [None]
            if method.schedule == "overlaps":
                lags = ["auto", 0] if method.group == "pair" else ["auto"]
            for lag in lags:
                given = {"method": method.name, "codec": name, "every": every, "lag": lag}
                yield OuterSettings.model_validate(given)


def rows(
    line: Line, tensors: ModelTensors, *, peers: int, step_s: float, every: int | None = None
) -> list[Row]:
    """Return all choices: those that compute nearly always first, by bytes; then the others, by how
    much they compute.
    """
    made = []
    for outer in choices(every):
        work = work_of(outer, tensors, peers=peers, step_s=step_s)
        made.append(Row(outer.resolved(), tensors, work, forecast(work, line)))

    def order(row: Row) -> tuple[bool, float]:
        good = row.forecast.utilisation >= GOOD
        return not good, row.forecast.sent_a_day if good else -row.forecast.utilisation

    return sorted(made, key=order)


DAY_S = 86_400.0


@dataclass(frozen=True)
class RunCost:
    """What ``steps`` inner steps cost a node; 0: a day of a run without end."""

    steps: int
    seconds: float
    sent: float
    """Bytes, and as many are received."""
    memory: float | None
    """Bytes for averaging, beyond training alone; None: not measured with these settings."""

    def said(self) -> str:
        """Return a sentence without an end for people."""
        if self.steps:
            said = f"{self.steps:,} steps take about {duration(self.seconds)}"
            if self.sent:
                said += f" and send about {amount(self.sent)}, and as much comes back"
        elif self.sent:
            said = f"a day sends about {amount(self.sent)}, and as much comes back"
        else:
            return ""
        if self.memory is not None and self.sent:
            said += f"; averaging takes some {amount(self.memory)} of memory beside training"
        return said


def run_cost(row: Row, *, steps: int, round_s: float | None = None) -> RunCost:
    """Return the cost of ``steps`` inner steps with the settings of ``row``, or of a day (0).

    ``round_s``: seconds of a round as it was measured; None: as forecast.
    """
    a_round = row.forecast.round_s if round_s is None else round_s
    rounds = steps / row.work.every if steps else DAY_S / a_round
    return RunCost(steps, rounds * a_round, rounds * row.forecast.sent, row.memory)


ESTIMATE_AFTER_S = 5.0
"""Seconds of training after which its speed is known."""
ESTIMATE_LATEST_S = 60.0
"""Seconds after which an estimate no longer waits for the end of the first round."""
ESTIMATE_STEPS = 10
UNMEASURED = Line(rate=1e9, round_trip=0.0)
"""Stands for a link in a forecast of which only the bytes are used."""


class StartEstimate:
    """What a run will cost, told once its speed is known: from steps that were taken, with all
    waiting.

    ``tensors``: what is averaged; ``done``: steps and rounds at the start of this run.
    """

    def __init__(
        self,
        outer: OuterSettings,
        tensors: ModelTensors,
        done: tuple[int, int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._outer = outer
        self._tensors = tensors
        self._clock = clock
        self._steps, self._rounds = done
        self._began = clock()
        self._told = False

    def news(self, steps: int, rounds: int, *, total: int, peers: int) -> str:
        """Return the estimate, once, at inner step ``steps`` of ``total`` (0: no end) in round
        ``rounds``; nothing before and after.
        """
        steps_done = steps - self._steps
        rounds_done = rounds - self._rounds
        passed = self._clock() - self._began
        if self._told or passed < ESTIMATE_AFTER_S or steps_done < ESTIMATE_STEPS:
            return ""
        if rounds_done < 1 and not self._outer.alone and passed < ESTIMATE_LATEST_S:
            return ""
        self._told = True
        step_s = passed / steps_done
        if self._outer.alone:
            left = max(total - steps, 0)
            return RunCost(left, left * step_s, 0.0, None).said()
        outer = self._outer.resolved()
        if outer.round != "steps":  # a round has as many steps as fit into it
            every = max(round(steps_done / max(rounds_done, 1)), 1)
            outer = outer.model_copy(update={"every": every})
        work = work_of(outer, self._tensors, peers=max(peers, 2), step_s=step_s)
        row = Row(outer, self._tensors, work, forecast(work, UNMEASURED))
        if total and total <= steps:
            return ""
        return run_cost(row, steps=total - steps if total else 0, round_s=work.computing_s).said()


# The one line of advice under the table of `shoal plan`, and the row that it advises.

PREFERRED = [(method.name, codec) for method in METHODS.values() for codec in method.advised]
"""What is chosen where the link carries it, the first first: overlapped pairs, then what a thinner
link still carries.
"""
LONGEST = 10_000
"""Inner steps in a round, at most, that are advised."""


def advise(found: Sequence[Row], line: Line) -> tuple[Row, str]:
    """Return the row to choose, with a longer round if nothing else is enough, and a sentence about
    it.

    What is advised computes nearly all the time and leaves a fifth of the link (``BUSY``) to all
    else.
    """
    named = {(row.outer.method, row.outer.codec): row for row in found if not row.blocks}
    liked = [named[choice] for choice in PREFERRED if choice in named]
    for row in liked:
        if row.forecast.good:
            return (
                row,
                f"On this link choose {_named(row)}: "
                f"{_cost(row)}{_instead(row, found)}{_thinner(row, liked)}.",
            )
    # Frequent rounds are worth more than precise ones.
    for row in sorted(liked, key=lambda row: (row.work.group != "pair", row.work.nbytes)):
        every = least_every(row.work, line, most=LONGEST)
        if every is not None:
            outer = row.outer.model_copy(update={"every": every})
            work = work_of(outer, row.tensors, peers=row.work.peers, step_s=row.work.step_s)
            longer = replace(row, outer=outer, work=work, forecast=forecast(work, line))
            now = row.forecast
            before = (
                f"computing {100 * now.utilisation:.0f} % of the time and filling "
                f"{100 * now.filled:.0f} % of it"
            )
            return (
                longer,
                f"On this link choose {_named(longer)}: {_cost(longer)}, in place of {before} with "
                f"every {row.work.every}.",
            )
    best = max(found, key=lambda row: row.forecast.utilisation)
    return best, (
        f"This link carries none of the settings: the best is {_named(best)}, with which "
        f"{_cost(best)}; choose a smaller model, or train a part of it (LoRA)."
    )


def _named(row: Row) -> str:
    lag = f", lag {row.work.lag}" if row.outer.lag is not None else ""
    return f"{row.outer.method}, {row.outer.codec}, every {row.work.every}{lag}"


def _cost(row: Row) -> str:
    found = row.forecast
    return (
        f"a node computes {100 * found.utilisation:.0f} % of the time, sends "
        f"{amount(found.sent_a_day)} a day and fills {100 * found.filled:.0f} % of the link"
    )


def _thinner(chosen: Row, liked: Sequence[Row]) -> str:
    """Return why the advice is not the row with the fewest bytes, where the same method can send
    fewer.
    """
    same = [row for row in liked if row.outer.method == chosen.outer.method and row.forecast.good]
    least = min(same, key=lambda row: row.forecast.sent_a_day)
    if least is chosen:
        return ""
    return (
        f"; {least.outer.codec} would send {amount(least.forecast.sent_a_day)} a day and round "
        "more, for a link that is paid by the byte"
    )


def _instead(chosen: Row, found: Sequence[Row]) -> str:
    """Return what waiting for each exchange would cost, if that is much."""
    for row in found:
        same = (row.outer.method, row.outer.codec) == (chosen.outer.method, chosen.outer.codec)
        if same and row.blocks and row.forecast.utilisation < GOOD:
            return (
                " (with lag 0, which waits for each exchange, it would compute "
                f"{100 * row.forecast.utilisation:.0f} %)"
            )
    return ""
