"""What an outer rule is: what is sent in an exchange, and what the mean of it does to the slow weights.

One sign convention for all: the pseudo-gradient is g = slow - fast, so that slow <- slow - lr * g moves towards fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from shoal.optim.exchange.base import RoundKey

State = dict[str, list[Tensor]]
"""A rule's memory: under each name one tensor per parameter, of the parameter's shape or a scalar; changed in place only."""

START = "start"
"""The name under which a rule keeps the weights from which its next contribution is measured, if that is not ``slow``.

``OuterOptimizer`` knows it: a contribution that is still in flight when the state is saved is added back to it, and so sent
again with the next one."""


@dataclass(frozen=True)
class RoundContext:
    """What a rule may know about the exchange that it prepares or applies."""

    key: RoundKey
    """The same for all peers of the group, so what follows from it need not be sent."""
    weight: float = 1.0
    """Of the own contribution; 0 only where a mean is applied in which this peer did not count (``OuterOptimizer.listen``)."""
    total: float = 1.0
    """Sum of the weights of the members; the own weight when nobody answered."""
    members: int = 1
    """Peers in the mean, this one included if it counts. 0: there is no mean yet (the first round of a delayed schedule)."""
    lag: int = 0
    """Inner steps between sending and applying."""
    sent: Sequence[Tensor] = field(default_factory=list)
    """The own contribution whose mean is applied, before any codec."""

    @property
    def share(self) -> float:
        """The part of the own contribution in the mean, in [0, 1]."""
        return self.weight / self.total


class Rule(Protocol):
    """One method's mathematics, for the parameters of one fragment. All tensors are float32 and on one device."""

    def initial(self, slow: Sequence[Tensor]) -> State:
        """The state before the first round, for all parameters."""
        ...

    def contribution(self, slow: Sequence[Tensor], fast: Sequence[Tensor], state: State, context: RoundContext) -> list[Tensor]:
        """The tensors whose mean the rule needs: some of those handed in, or fresh ones. Their shapes follow from the model's."""
        ...

    def apply(
        self, slow: Sequence[Tensor], fast: Sequence[Tensor], mean: Sequence[Tensor], state: State, context: RoundContext
    ) -> None:
        """Advance ``slow`` and ``state``, and set ``fast`` to the weights that training goes on with.

        Under a delayed schedule ``mean`` is empty and ``facts.members`` 0 as long as nothing has arrived.
        """
        ...


@runtime_checkable
class Anchored(Protocol):
    """A rule whose slow weights are the same on all peers of a group, though only displacements are sent.

    Who misses a round drifts away for good, so it should take over the others' slow weights and what is ``shared``.
    """

    shared: ClassVar[tuple[str, ...]]
    """Names in the state that are the same on all peers too."""


OUTER_STEP = ("DiLoCo", "Decoupled", "Eager")
"""Kinds of rules whose momentum is torch's SGD buffer over mean pseudo-gradients: each can go on with another's."""


def kind_of(rule: Rule) -> str:
    """What a rule is called where its state is saved: DiLoCo, NoLoCo and so on."""
    return type(rule).__name__.removesuffix("Rule")


def same_memory(was: str, now: str) -> bool:
    """True if the momentum of a rule of kind ``was`` means the same to one of kind ``now``."""
    return was == now or (was in OUTER_STEP and now in OUTER_STEP)


def zeros(slow: Sequence[Tensor]) -> list[Tensor]:
    """A zero for each value."""
    return [torch.zeros_like(tensor) for tensor in slow]


def pseudo_gradient(slow: Sequence[Tensor], fast: Sequence[Tensor]) -> list[Tensor]:
    """slow - fast."""
    return [s - f for s, f in zip(slow, fast, strict=True)]


def assign(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def check_rate_and_momentum(lr: float, momentum: float) -> None:
    """ValueError unless lr is not negative and momentum in [0, 1]."""
    if not lr >= 0:
        raise ValueError(f"outer lr must not be negative, got {lr}")
    if not 0 <= momentum <= 1:
        raise ValueError(f"outer momentum must lie in [0, 1], got {momentum}")
