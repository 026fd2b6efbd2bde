"""Table of the methods by name: optimizer, intended group, what is sent, and knobs.

    method = method_named("streaming")
    opt = method.make(inner, exchange, every=50, lag=5, model=model)      # other arguments: the method's defaults
    method.knobs                                                          # {"every": 100, "fragments": 4, ...}

The command line, the node, the tests and the benchmarks go through this table, so that a new method is one line here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shoal.optim.codecs.base import FLOAT32, Codec, check_sends_weights
from shoal.optim.codecs.mod4 import check_no_pair
from shoal.optim.exchange.base import Exchange
from shoal.optim.methods.optimizers import (
    CO2,
    SPARSE,
    SPARTA,
    DecoupledDiLoCo,
    DiLoCo,
    Eager,
    GASLoC,
    LocalSGD,
    NoLoCo,
    SparseLoCo,
    StreamingDiLoCo,
)
from shoal.optim.outer.optimizer import OuterOptimizer
from shoal.optim.outer.parameters import Inner

NO_KNOBS = ("codec", "plain")
"""Arguments of optimizers that are objects, not settings."""


@dataclass(frozen=True)
class Method:
    """Method of outer optimization, as a row of the table."""

    name: str
    optimizer: Callable[..., OuterOptimizer]
    group: Literal["pair", "everyone", "nobody"]
    """Peers that the mean is meant to be over."""
    sends: Literal["weights", "displacement"]
    """Whole weights, or pseudo-gradients, for which codecs below 8 bits are precise enough."""
    when: str
    """The method's purpose, in a few words."""
    slow: bool = False
    """True: evaluate with the slow weights (``OuterOptimizer.averaged``); with a delay the fast ones differ from the group's."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the optimizer that define this method and are no knobs."""
    weights: Literal["equal", "tokens", "rate"] = "equal"
    """Default weighting of contributions (`shoal.optim.outer.weighting`)."""
    codec: Codec = FLOAT32
    """The default codec."""

    @property
    def knobs(self) -> dict[str, Any]:
        """The method's own keyword arguments and their defaults; besides them it takes all ``Options``."""
        parameters = inspect.signature(self.optimizer).parameters.values()
        skip = (*NO_KNOBS, *self.fixed)
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in skip}

    def make(self, inner: Inner, exchange: Exchange, **arguments: Any) -> OuterOptimizer:
        """Return the optimizer; ``arguments`` are knobs and ``Options``. ValueError for values that method or codec cannot use."""
        return self.optimizer(inner, exchange, **self.fixed, **arguments)

    def check_codec(self, codec: Codec) -> None:
        """Raise ValueError if ``codec`` is too lossy for what this method sends, or for pairs where this averages over everyone."""
        if self.group == "everyone":
            check_no_pair(codec)
        if self.sends == "weights":
            check_sends_weights(codec, self.name)


_ALL = (
    Method("noloco", NoLoCo, "pair", "weights", "the default: no barrier, a late or dead peer holds up one other at most"),
    Method("local", LocalSGD, "pair", "weights", "the simplest: plain averaging with a partner, nothing to tune"),
    Method("gasloc", GASLoC, "pair", "weights", "gossip like noloco, with Nesterov's momentum on the outer iterate"),
    Method("none", LocalSGD, "nobody", "weights", "training alone, to compare with", fixed={"fragments": 1, "lag": 0}),
    Method("diloco", DiLoCo, "everyone", "displacement", "few, equal, reliable peers: all hold the same weights after a round"),
    Method("diloco-hb", DiLoCo, "everyone", "displacement", "diloco with heavy-ball momentum", fixed={"nesterov": False}),
    Method("streaming", StreamingDiLoCo, "everyone", "displacement", "a thin link: fragments, sent while training", slow=True),
    Method(
        "decoupled",
        DecoupledDiLoCo,
        "everyone",
        "displacement",
        "uneven peers: fragments, merged by direction",
        slow=True,
        weights="rate",
    ),
    Method("eager", Eager, "everyone", "displacement", "a slow link: the exchange has a whole round of time", slow=True),
    Method("co2", CO2, "everyone", "displacement", "the same, with a penalty on stale means and a clip", slow=True),
    Method("sparseloco", SparseLoCo, "everyone", "displacement", "the fewest bytes: the largest values in 2 bits", codec=SPARSE),
    Method("sparta", SPARTA, "everyone", "weights", "a trickle: at each step a random 0.5 % of the weights is averaged"),
)
METHODS: Mapping[str, Method] = {method.name: method for method in _ALL}
"""All methods by name, in the order of display."""


def method_named(name: str) -> Method:
    """Return the method of that name. ValueError for an unknown name lists the known ones."""
    method = METHODS.get(name)
    if method is None:
        raise ValueError(f"unknown method {name[:64]!r}: choose one of {', '.join(METHODS)}")
    return method


def methods_with(knob: str) -> list[str]:
    return [method.name for method in METHODS.values() if knob in method.knobs]
