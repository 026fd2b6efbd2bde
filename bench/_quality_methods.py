"""The methods that bench/quality.py compares, and the few settings that each may choose from.

Every method has exactly three settings next to the grid of inner learning rates, the first being its documented default. Data
parallel training and the methods without an outer knob choose among three values of AdamW's second beta instead, so that nobody
is tuned with more effort than anybody else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from optim import CO2, SPARTA, DecoupledDiLoCo, DiLoCo, Eager, GASLoC, LocalSGD, NoLoCo, OuterOptimizer, SparseLoCo, StreamingDiLoCo

Setting = Mapping[str, float | bool]
INNER: tuple[Setting, ...] = ({"beta2": 0.99}, {"beta2": 0.95}, {"beta2": 0.999})
FRAGMENTS = 4


@dataclass(frozen=True)
class Recipe:
    """How a method is made for the benchmark."""

    settings: tuple[Setting, ...]
    make: Callable[..., OuterOptimizer] | None = None
    """None: data parallel, which has no outer optimizer."""
    group: Literal["all", "pair"] = "all"
    codec: str = "float32"
    weights: bool = False
    """It sends whole weights, so codecs for displacements are not for it."""
    every: int | None = None
    """The only number of steps between two exchanges that it has; None: free."""
    fixed: Mapping[str, Any] | None = None
    """Arguments that are not chosen from."""
    tuned_at: int = 4
    """Peers of the runs that choose its learning rate."""


def _momenta(*pairs: tuple[float, float], **more: Any) -> tuple[Setting, ...]:
    return tuple({"lr": lr, "momentum": momentum, **more} for lr, momentum in pairs)


METHODS: dict[str, Recipe] = {
    "ddp": Recipe(INNER, every=1),
    "ddp-xK": Recipe(INNER, every=1),
    "ddp-updates": Recipe(INNER, every=1),
    "local-sgd": Recipe(INNER, LocalSGD, weights=True),
    "diloco": Recipe(_momenta((0.7, 0.9), (0.7, 0.6), (1.0, 0.3)), DiLoCo),
    "diloco-hb": Recipe(_momenta((0.7, 0.9), (0.7, 0.5), (1.0, 0.3)), DiLoCo, fixed={"nesterov": False}),
    "streaming": Recipe(
        _momenta((0.4, 0.9), (0.7, 0.6), (1.0, 0.3)), StreamingDiLoCo, fixed={"fragments": FRAGMENTS, "lag": 1, "mix": 0.5}
    ),
    "decoupled": Recipe(_momenta((0.7, 0.9), (0.7, 0.6), (1.0, 0.3)), DecoupledDiLoCo, fixed={"fragments": FRAGMENTS, "lag": 2}),
    "eager": Recipe(_momenta((0.4, 0.6), (0.7, 0.3), (1.0, 0.1)), Eager),
    "co2": Recipe(({"lr": 1.0, "momentum": 0.2}, {"lr": 0.7, "momentum": 0.5}, {"lr": 1.0, "momentum": 0.2, "keep": True}), CO2),
    "noloco": Recipe(_momenta((0.7, 0.5), (0.7, 0.3), (1.0, 0.3)), NoLoCo, "pair", weights=True),
    "noloco-2": Recipe(
        (
            {"lr": 0.7, "momentum": 0.5, "pull": 0.3},
            {"lr": 0.7, "momentum": 0.3, "pull": 0.5},
            {"lr": 1.0, "momentum": 0.3, "pull": 0.3},
        ),
        NoLoCo,
        "pair",
        weights=True,
    ),
    "gasloc": Recipe(_momenta((0.7, 0.5), (0.7, 0.8), (1.0, 0.3)), GASLoC, "pair", weights=True),
    "sparseloco": Recipe(({"lr": 1.0}, {"lr": 0.7}, {"lr": 1.3}), SparseLoCo, codec="topk2+ef:0.95"),
    "sparta": Recipe(INNER, SPARTA, weights=True, every=1, fixed={"part": 0.005}),
    "lookahead": Recipe(({"lr": 0.5}, {"lr": 0.7}, {"lr": 0.9}), DiLoCo, fixed={"momentum": 0.0}, tuned_at=1),
}
