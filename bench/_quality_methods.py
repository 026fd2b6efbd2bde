"""The methods that bench/quality.py compares, and the few settings that each may choose from.

Every method has exactly three settings next to the grid of inner learning rates, the first being
the published one. Data parallel training and the methods without an outer knob choose among three
values of AdamW's second beta instead, so that nobody is tuned with more effort than anybody else.
The overlapped forms are not tuned: they take over what their blocking forms chose.

With "-muon" the matrices of the blocks are trained by Muon, everything else by AdamW at 0.3 of
Muon's rate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shoal.optim import OuterOptimizer
from shoal.optim.methods import METHODS as REGISTRY

Setting = Mapping[str, float | bool]
INNER: tuple[Setting, ...] = ({"beta2": 0.99}, {"beta2": 0.95}, {"beta2": 0.999})
FRAGMENTS = 4
BLOCKING = {"lag": 0}
"""Arguments of gossip that waits."""
RATES: Mapping[str, tuple[float, float, float, float]] = {
    "adamw": (3e-3, 6e-3, 1.2e-2, 2.4e-2),
    "muon": (1e-2, 2e-2, 4e-2, 8e-2),
}
"""Inner learning rates to choose from; the second is tried first."""


@dataclass(frozen=True)
class Recipe:
    """How a method is made for the benchmark."""

    settings: tuple[Setting, ...]
    name: str | None = None
    """In the table of optim/methods.py; None: data parallel, which has no outer optimizer."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that are not chosen from."""
    every: int | None = None
    """The only number of steps between two exchanges that it has; None: free."""
    tuned_at: int = 4
    """Peers of the runs that choose its learning rate."""
    everyone: bool = False
    """A method for pairs, here with a mean over everyone."""
    inner: Literal["adamw", "muon"] = "adamw"
    like: str | None = None
    """The method whose tuning it takes over; None: its own."""
    overlap: bool = False
    """Sent in four fragments, each applied a fifth of a round after it was sent."""

    @property
    def make(self) -> Callable[..., OuterOptimizer] | None:
        return None if self.name is None else REGISTRY[self.name].make

    @property
    def group(self) -> str:
        return "everyone" if self.everyone or self.name is None else REGISTRY[self.name].group

    def arguments(self, every: int) -> dict[str, Any]:
        """The arguments that are not chosen from."""
        return {
            **self.fixed,
            **({"fragments": FRAGMENTS, "lag": max(1, every // 5)} if self.overlap else {}),
        }

    @property
    def codec(self) -> str:
        """Its own; float32 for pairs, as the recorded rows have it."""
        return "float32" if self.name is None or self.group == "pair" else REGISTRY[self.name].codec

    @property
    def weights(self) -> bool:
        """It sends whole weights, so codecs for displacements are not for it."""
        return self.name is not None and REGISTRY[self.name].sends == "weights"


def _momenta(*pairs: tuple[float, float]) -> tuple[Setting, ...]:
    return tuple({"lr": lr, "momentum": momentum} for lr, momentum in pairs)


METHODS: dict[str, Recipe] = {
    "ddp": Recipe(INNER, every=1),
    "ddp-xK": Recipe(INNER, every=1),
    "ddp-updates": Recipe(INNER, every=1),
    "none": Recipe(INNER, "none", every=1),
    "local": Recipe(INNER, "local", BLOCKING),
    "local-sgd": Recipe(INNER, "local", BLOCKING, everyone=True),
    "diloco": Recipe(_momenta((0.7, 0.9), (0.7, 0.6), (1.0, 0.3)), "diloco"),
    "diloco-hb": Recipe(_momenta((0.7, 0.9), (0.7, 0.5), (1.0, 0.3)), "diloco-hb"),
    "streaming": Recipe(
        _momenta((0.4, 0.9), (0.7, 0.6), (1.0, 0.3)),
        "streaming",
        {"fragments": FRAGMENTS, "lag": 1, "mix": 0.5},
    ),
    "decoupled": Recipe(
        _momenta((0.7, 0.9), (0.7, 0.6), (1.0, 0.3)),
        "decoupled",
        {"fragments": FRAGMENTS, "lag": 2},
    ),
    "eager": Recipe(_momenta((0.4, 0.6), (0.7, 0.3), (1.0, 0.1)), "eager"),
    "co2": Recipe(
        (
            {"lr": 1.0, "momentum": 0.2},
            {"lr": 0.7, "momentum": 0.5},
            {"lr": 1.0, "momentum": 0.2, "keep": True},
        ),
        "co2",
    ),
    "noloco": Recipe(_momenta((0.7, 0.5), (0.7, 0.3), (1.0, 0.3)), "noloco", BLOCKING),
    "noloco-2": Recipe(
        (
            {"lr": 0.7, "momentum": 0.5, "pull": 0.3},
            {"lr": 0.7, "momentum": 0.3, "pull": 0.5},
            {"lr": 1.0, "momentum": 0.3, "pull": 0.3},
        ),
        "noloco",
        BLOCKING,
    ),
    "gasloc": Recipe(_momenta((0.7, 0.5), (0.7, 0.8), (1.0, 0.3)), "gasloc", BLOCKING),
    "sparseloco": Recipe(({"lr": 1.0}, {"lr": 0.7}, {"lr": 1.3}), "sparseloco"),
    "sparta": Recipe(INNER, "sparta", {"part": 0.005}, every=1),
    "ddp-muon": Recipe(({"beta2": 0.95}, {"beta2": 0.99}, {"beta2": 0.999}), every=1, inner="muon"),
    "noloco-muon": Recipe(
        _momenta((0.7, 0.5), (0.7, 0.3), (1.0, 0.3)), "noloco", BLOCKING, inner="muon"
    ),
    "noloco-overlap": Recipe(
        _momenta((0.7, 0.5), (0.7, 0.3), (1.0, 0.3)), "noloco", like="noloco", overlap=True
    ),
    "noloco-overlap-muon": Recipe(
        _momenta((0.7, 0.5), (0.7, 0.3), (1.0, 0.3)),
        "noloco",
        inner="muon",
        like="noloco-muon",
        overlap=True,
    ),
    "lookahead": Recipe(
        ({"lr": 0.5}, {"lr": 0.7}, {"lr": 0.9}), "diloco", {"momentum": 0.0}, tuned_at=1
    ),
}
