"""The methods of outer optimization, one row each: all that depends on a method follows from its
row.

    method = method_named("streaming")
    method.knobs                                        # {"every": 100, "fragments": 4, ...}
    opt = method.make(inner, exchange, every=50, lag=5, model=model)

A row names the optimizer, which stands with its rule in `shoal.optim.rules`, or in
`shoal.optim.experimental`; from it follow ``--method`` and its help, what settings are allowed, the
memory that a node plans with, and `shoal plan`. The table itself loads no torch.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from shoal.optim.codecs.base import Codec
    from shoal.optim.exchange.base import Exchange
    from shoal.optim.outer.inner import Inner
    from shoal.optim.outer.optimizer import OuterOptimizer

DEFAULT_LAG: int | Literal["auto"] = "auto"
"""Lag of a method that overlaps, where none is given; in a new swarm too."""
GOSSIP_FRAGMENTS = 4
"""Fragments of a gossip method with a lag, by default."""
NO_KNOBS = ("codec", "plain")
"""Arguments of optimizers that are objects, not settings."""


@dataclass(frozen=True)
class Memory:
    """Main memory that a method needs beyond model, gradients and inner optimizer."""

    state: float = 1
    """Of what rule and codec remember, in times the slow weights'."""
    exchange: float = 2
    """Of an exchange, in times the slow weights': the partner's contribution, in which the mean is
    computed, and the own one where it is held too.
    """
    measured: tuple[float | None, float | None] = (None, None)
    """Of all of it beyond `shoal.node.plan.rows.FIXED_BYTES`, in bytes a parameter, where it was
    measured: with lag 0, and where a mean is applied later.
    """


@dataclass(frozen=True)
class Method:
    """Method of outer optimization, as a row of the table."""

    name: str
    place: str
    """The optimizer's module below `shoal.optim`, and its class."""
    group: Literal["pair", "everyone", "nobody"]
    """Peers that the mean is meant to be over."""
    sends: Literal["weights", "displacement"]
    """Whole weights, or pseudo-gradients, for which codecs below 8 bits are precise enough."""
    schedule: Literal["waits", "overlaps", "delayed"]
    """A mean is waited for, or applied by ``lag`` in ``fragments`` if these are set so, or a whole
    round after it was sent.
    """
    when: str
    """The method's purpose, in a few words."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the optimizer that define this method and are no knobs."""
    codec: str = "float32"
    """The default codec of a swarm.

    The classes of methods for pairs have float32 elsewhere: any exchange can carry it.
    """
    weights: Literal["equal", "tokens", "rate"] = "equal"
    """Default weighting of contributions (`shoal.optim.outer.contribution_weight`)."""
    doubles: bool = False
    """True: where weights differ it sends two tensors a parameter, since its pull is never
    weighted (not if `unweighted_count` covers all that it sends).
    """
    scales: bool = False
    """True: it sends a number besides each tensor, the length of its pseudo-gradient."""
    mixes: bool = False
    """True: it sends values of all parameters as one tensor."""
    follows: bool = True
    """False: a contribution belongs to its round only, and one that comes too late is none of the
    next round's.
    """
    memory: Memory = Memory()

    @property
    def optimizer(self) -> type[OuterOptimizer]:
        module, _, name = self.place.rpartition(".")
        optimizer: type[OuterOptimizer] = getattr(
            importlib.import_module(f"shoal.optim.{module}"), name
        )
        return optimizer

    @property
    def experimental(self) -> bool:
        return self.place.startswith("experimental.")

    @property
    def slow(self) -> bool:
        """True: evaluate with the slow weights (``averaged``), since with a delay the fast ones
        differ from the group's.
        """
        return self.group == "everyone" and self.schedule != "waits"

    @property
    def knobs(self) -> dict[str, Any]:
        """The method's own keyword arguments and their defaults; besides them it takes all
        ``Options``.
        """
        parameters = inspect.signature(self.optimizer).parameters.values()
        skip = (*NO_KNOBS, *self.fixed)
        return {
            p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in skip
        }

    def make(self, inner: Inner, exchange: Exchange, **arguments: Any) -> OuterOptimizer:
        """Return the optimizer; ``arguments`` are knobs and ``Options``.

        ValueError for values that method or codec cannot use.
        """
        return self.optimizer(inner, exchange, **self.fixed, **arguments)

    def check_codec(self, codec: Codec) -> None:
        """Raise ValueError if ``codec`` is too lossy for what this method sends, or for pairs where
        this averages over everyone, or by parameters where this sends none of them.
        """
        from shoal.optim.codecs.base import check_sends_weights
        from shoal.optim.codecs.mod4 import check_no_pair
        from shoal.optim.codecs.partial import check_can_divide

        if self.group == "everyone":
            check_no_pair(codec)
        if self.sends == "weights":
            check_sends_weights(codec, self.name)
        if self.mixes:
            check_can_divide(codec, self.name)


_CORE = (
    Method(
        "noloco",
        "rules.noloco.NoLoCo",
        group="pair",
        sends="weights",
        schedule="overlaps",
        when="the default: no barrier, a late or dead peer holds up one other at most",
        codec="mod4",
        doubles=True,
        memory=Memory(exchange=1, measured=(12.3, 13.9)),
    ),
    Method(
        "local",
        "rules.local_sgd.LocalSGD",
        group="pair",
        sends="weights",
        schedule="overlaps",
        when="the simplest: plain averaging with a partner, nothing to tune",
        codec="mod4",
        doubles=True,
        memory=Memory(state=0, exchange=1),
    ),
    Method(
        "none",
        "rules.local_sgd.LocalSGD",
        group="nobody",
        sends="weights",
        schedule="waits",
        when="training alone, to compare with",
        fixed={"fragments": 1, "lag": 0},
        memory=Memory(state=0, exchange=0),
    ),
    Method(
        "diloco",
        "rules.diloco.DiLoCo",
        group="everyone",
        sends="displacement",
        schedule="waits",
        when="few, equal, reliable peers: all hold the same weights after a round",
        memory=Memory(exchange=1, measured=(12.4, None)),
    ),
    Method(
        "diloco-hb",
        "rules.diloco.DiLoCo",
        group="everyone",
        sends="displacement",
        schedule="waits",
        when="diloco with heavy-ball momentum",
        fixed={"nesterov": False},
        memory=Memory(exchange=1),
    ),
    Method(
        "streaming",
        "rules.streaming.StreamingDiLoCo",
        group="everyone",
        sends="displacement",
        schedule="overlaps",
        when="a thin link: fragments, sent while training",
        memory=Memory(measured=(None, 12.3)),
    ),
    Method(
        "co2",
        "rules.co2.CO2",
        group="everyone",
        sends="displacement",
        schedule="delayed",
        when="a slow link: an exchange has a whole round of time; stale means count less",
        memory=Memory(state=2, measured=(None, 28.0)),
    ),
    Method(
        "sparseloco",
        "rules.sparseloco.SparseLoCo",
        group="everyone",
        sends="displacement",
        schedule="waits",
        when="the fewest bytes: the largest values in 2 bits",
        codec="topk2+ef:0.95",
    ),
)
_EXPERIMENTAL = (
    Method(
        "gasloc",
        "experimental.gasloc.GASLoC",
        group="pair",
        sends="weights",
        schedule="overlaps",
        when="gossip like noloco, with Nesterov's momentum on the outer iterate",
        codec="mod4",
    ),
    Method(
        "decoupled",
        "experimental.decoupled.DecoupledDiLoCo",
        group="everyone",
        sends="displacement",
        schedule="overlaps",
        when="uneven peers: fragments, merged by direction",
        weights="rate",
        scales=True,
    ),
    Method(
        "eager",
        "experimental.eager.Eager",
        group="everyone",
        sends="displacement",
        schedule="delayed",
        when="a slow link: the exchange has a whole round of time",
        memory=Memory(state=3),
    ),
    Method(
        "sparta",
        "experimental.sparta.SPARTA",
        group="everyone",
        sends="weights",
        schedule="waits",
        when="a trickle: at each step a random 0.5 % of the weights is averaged",
        mixes=True,
        follows=False,
        memory=Memory(state=0, exchange=0.1),
    ),
)
METHODS: Mapping[str, Method] = {method.name: method for method in (*_CORE, *_EXPERIMENTAL)}
"""All methods by name, in the order of display; the first is the default."""
DEFAULT = _CORE[0].name
ALONE = next(method.name for method in _CORE if method.group == "nobody")
"""The method that trains without exchange."""


def method_named(name: str) -> Method:
    """Return the method of that name. ValueError for an unknown name lists the known ones."""
    method = METHODS.get(name)
    if method is None:
        raise ValueError(f"unknown method {name[:64]!r}: choose one of {', '.join(METHODS)}")
    return method


def methods_with(knob: str) -> list[str]:
    return [method.name for method in METHODS.values() if knob in method.knobs]


def methods_of(group: str, *, experimental: bool | None = None) -> list[str]:
    """Return the methods that average with ``group``; with ``experimental`` only those that are, or
    are not.
    """
    names = []
    for method in METHODS.values():
        if method.group == group and experimental in (None, method.experimental):
            names.append(method.name)
    return names


def one_of(names: Iterable[str]) -> str:
    """Return ``a, b or c``."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
