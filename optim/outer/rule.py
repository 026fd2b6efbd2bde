"""The ``Rule`` protocol: what is sent to an exchange, and what the mean of it does.

    sent = rule.contribution(slow, fast, state, context)       # such as slow - fast
    rule.apply(slow, fast, mean_of(sent), state, context)      # changes all in place

The pseudo-gradient is g = slow - fast, so that slow <- slow - lr * g moves towards fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from shoal.optim.exchange.base import RoundKey

State = dict[str, list[Tensor]]
"""By name one tensor per parameter, of its shape or a scalar; changed in place only."""

START = "start"
"""Name in the state of the weights from which contributions are measured, if not from ``slow``.

What is in flight when the state is saved is added back to it, and so sent again with the next one.
"""
AHEAD = "ahead"
"""Name in the state of what this peer has applied of its own, which the next mean takes back."""


@dataclass(frozen=True)
class RoundContext:
    """Information for a rule about the exchange that it prepares or applies."""

    key: RoundKey
    """The same for all peers of the group, so values derived from it need not be sent."""
    weight: float = 1.0
    """Weight of the own contribution; 0 only if the mean does not count this peer
    (``OuterOptimizer.listen``).
    """
    total: float = 1.0
    """Sum of the weights of the members; the own weight if no peer answered."""
    members: int = 1
    """Peers in the mean, this one included if it counts. 0: there is no mean yet (the first round
    of a delayed schedule).
    """
    lag: int = 0
    """Inner steps between sending and applying."""
    sent: Sequence[Tensor] = field(default_factory=list)
    """The own contribution whose mean is applied, before any codec."""
    fast: Sequence[Tensor] = field(default_factory=list)
    """The fast weights when it was sent, for rules of ``KeepsFast``; empty if ``lag`` is 0."""
    places: Sequence[int] = ()
    """Places of the given parameters in the fragment, if the rule has only a part of it."""
    sizes: Sequence[int] = ()
    """Numbers of values of the fragment's parameters, if ranks share them, so that a tensor of
    another rank is empty.
    """
    owners: Callable[[Sequence[int], Sequence[Tensor]], list[Tensor]] = lambda places, scalars: (
        list(scalars)
    )
    """Returns scalars of the parameters at ``places`` as the ranks have them that own the
    parameters.
    """

    @property
    def share(self) -> float:
        return self.weight / self.total

    def of_owners(self, scalars: Sequence[Tensor]) -> list[Tensor]:
        """Return scalars of the given parameters, one each, as their owners have them: for formulas
        that join parameters.
        """
        return self.owners(self.places, scalars)


class Rule(Protocol):
    """Mathematics of one method, for the parameters of one fragment.

    All tensors are float32, or all float64, on one device.

    In a peer of several ranks each rank runs it, and a tensor that another rank owns is empty. What
    it computes for one parameter must therefore depend on that one alone, or on
    ``RoundContext.of_owners``.
    """

    def initial(self, slow: Sequence[Tensor]) -> State:
        """Return the state before the first round, for all parameters."""
        ...

    def contribution(
        self, slow: Sequence[Tensor], fast: Sequence[Tensor], state: State, context: RoundContext
    ) -> Sequence[Tensor]:
        """Return the tensors whose mean the rule needs: some of the arguments, fresh ones, or
        ``OnDemand`` ones made of arguments.

        Tensor i belongs to parameter i % n of n, and has its shape or is a scalar (``SendsValues``
        are an exception).
        """
        ...

    def apply(
        self,
        slow: Sequence[Tensor],
        fast: Sequence[Tensor],
        mean: Sequence[Tensor],
        state: State,
        context: RoundContext,
    ) -> None:
        """Advance ``slow`` and ``state``, and set ``fast`` to the weights with which training goes
        on.

        Under a delayed schedule ``mean`` is empty and ``context.members`` 0 before the first mean.
        """
        ...


@runtime_checkable
class AveragesEvenly(Protocol):
    """Rule of which some tensors need a plain mean, whatever the members' weights."""

    def unweighted_count(self, count: int) -> int:
        """Return how many of the first tensors of a contribution of ``count`` these are."""
        ...


@runtime_checkable
class SendsValues(Protocol):
    """Rule whose contribution is one flat tensor of some values of each parameter, in their
    order.
    """

    def counts(self, sizes: Sequence[int], key: RoundKey) -> list[int]:
        """Return how many values of each parameter of a fragment it sends, given their numbers of
        values.
        """
        ...


@runtime_checkable
class Anchored(Protocol):
    """Rule under which all peers of a group have the same slow weights, though only displacements
    are sent.

    A peer that misses a round diverges for good, so it should adopt the others' slow weights and
    ``shared`` state.
    """

    shared: ClassVar[tuple[str, ...]]
    """Names of the state that is the same on all peers too."""


@runtime_checkable
class KeepsFast(Protocol):
    """Rule that, under a lag, must know the fast weights as they were sent (``RoundContext.fast``)
    and does not send them.
    """

    keeps_fast: ClassVar[bool]
    """True. They take the memory of one more copy of the fragment while it is in flight."""


OUTER_STEP = ("DiLoCo", "Decoupled", "Eager")
"""Kinds of rules with torch's SGD buffer for momentum: each can go on with another's."""


def kind_of(rule: object) -> str:
    return type(rule).__name__.removesuffix("Rule")


def same_memory(was: str, now: str) -> bool:
    """Return True if a rule of kind ``now`` can continue with the momentum of kind ``was``."""
    return was == now or (was in OUTER_STEP and now in OUTER_STEP)


def zeros(slow: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(tensor) for tensor in slow]


def pseudo_gradient(slow: Sequence[Tensor], fast: Sequence[Tensor]) -> list[Tensor]:
    return [s - f for s, f in zip(slow, fast, strict=True)]


def move_on(
    fast: Sequence[Tensor], slow: Sequence[Tensor], sent: Iterable[Tensor], lag: int
) -> None:
    """Replace what was ``sent`` by the new slow weights: fast <- fast + (slow - sent).

    What was learnt since then is kept; without a lag that is nothing. It is taken first, so that a
    weight that did not change since ends as exactly the slow one.
    """
    if lag == 0:
        assign(fast, slow)
        return
    for f, s, then in zip(fast, slow, sent, strict=True):
        f.sub_(then).add_(s)


@torch.no_grad()
def assign(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def check_rate_and_momentum(lr: float, momentum: float) -> None:
    """Raise ValueError unless lr is not negative and momentum in [0, 1]."""
    if not lr >= 0:
        raise ValueError(f"outer lr must not be negative, got {lr}")
    if not 0 <= momentum <= 1:
        raise ValueError(f"outer momentum must lie in [0, 1], got {momentum}")
