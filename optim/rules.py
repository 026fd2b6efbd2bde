"""Outer rules: what is sent, and what the mean of it does to the slow weights.

One sign convention for all: the pseudo-gradient is g = slow - fast, so that slow <- slow - lr * g moves towards fast.
All tensors are float32 and of equal shapes, list by list; a rule changes ``slow``, ``fast`` and ``state`` in place.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

State = dict[str, list[Tensor]]


class Rule(Protocol):
    """One method's mathematics."""

    def contribution(self, slow: Sequence[Tensor], fast: Sequence[Tensor]) -> list[Tensor]:
        """The tensors whose mean the rule needs."""
        ...

    def apply(
        self, slow: Sequence[Tensor], fast: Sequence[Tensor], mean: Sequence[Tensor], state: State, lag: int
    ) -> None:
        """Advance ``slow`` and set ``fast`` to the weights that training goes on with. ``lag``: inner steps since the send."""
        ...


def _momentum(state: State, like: Sequence[Tensor]) -> list[Tensor]:
    if "momentum" not in state:
        state["momentum"] = [torch.zeros_like(tensor) for tensor in like]
    return state["momentum"]


def _restart_from(slow: Sequence[Tensor], fast: Sequence[Tensor]) -> None:
    for slow_tensor, fast_tensor in zip(slow, fast, strict=True):
        fast_tensor.copy_(slow_tensor)


@dataclass(frozen=True)
class NoLoCoRule:
    """NoLoCo (2506.10911v1, Eq. 1-3), in the form of the authors' code, whose sign of the second term is the descending one.

    With g = slow - fast, momentum a, outer lr b and pull c, means taken over the group:

        v <- a v + b mean(g) + c (slow - mean(slow));   slow <- slow - v;   fast <- slow

    This is heavy ball, not Nesterov. When c = b (as in the authors' runs; the paper gives no value) the two terms collapse to
    b (slow - mean(fast)): only the fast weights travel, half the bytes. Otherwise g and slow both travel.

    The replicas' spread contracts for 0 < c < 2 (1 - a^2) with pairs (our derivation; the paper's Eq. 74 recommends values
    that diverge for a = 0.9): outside of it a warning says so.
    """

    lr: float = 0.7
    momentum: float = 0.5
    pull: float | None = None
    """None: equal to ``lr``."""

    def __post_init__(self) -> None:
        if not self.lr >= 0:
            raise ValueError(f"outer lr must not be negative, got {self.lr}")
        if not 0 <= self.momentum <= 1:
            raise ValueError(f"outer momentum must lie in [0, 1], got {self.momentum}")
        if not self.gamma >= 0:
            raise ValueError(f"pull must not be negative, got {self.gamma}")
        limit = 2 * (1 - self.momentum**2)
        if self.gamma >= limit and self.gamma != 0:
            warnings.warn(
                f"pull {self.gamma:g} with momentum {self.momentum:g} lets the peers drift apart: keep pull below {limit:g} "
                "or lower the momentum",
                stacklevel=3,
            )

    @property
    def gamma(self) -> float:
        """The pull towards the group's mean slow weights."""
        return self.lr if self.pull is None else self.pull

    def contribution(self, slow: Sequence[Tensor], fast: Sequence[Tensor]) -> list[Tensor]:
        """``fast`` when pull = lr, else the pseudo-gradients followed by ``slow``."""
        if self.gamma == self.lr:
            return list(fast)
        return [s - f for s, f in zip(slow, fast, strict=True)] + list(slow)

    def apply(
        self, slow: Sequence[Tensor], fast: Sequence[Tensor], mean: Sequence[Tensor], state: State, lag: int
    ) -> None:
        """One outer step."""
        velocity = _momentum(state, slow)
        if self.gamma == self.lr:
            for v, s, mean_fast in zip(velocity, slow, mean, strict=True):
                v.mul_(self.momentum).add_(s - mean_fast, alpha=self.lr)
                s.sub_(v)
        else:
            count = len(slow)
            for v, s, g, mean_slow in zip(velocity, slow, mean[:count], mean[count:], strict=True):
                v.mul_(self.momentum).add_(g, alpha=self.lr).add_(s - mean_slow, alpha=self.gamma)
                s.sub_(v)
        _restart_from(slow, fast)


@dataclass(frozen=True)
class LocalSGDRule:
    """Local SGD / FedAvg: the slow weights become the mean of the fast weights. With pairs: epidemic averaging."""

    def contribution(self, slow: Sequence[Tensor], fast: Sequence[Tensor]) -> list[Tensor]:
        """The fast weights."""
        return list(fast)

    def apply(
        self, slow: Sequence[Tensor], fast: Sequence[Tensor], mean: Sequence[Tensor], state: State, lag: int
    ) -> None:
        """Replace slow and fast by the mean."""
        for slow_tensor, mean_tensor in zip(slow, mean, strict=True):
            slow_tensor.copy_(mean_tensor)
        _restart_from(slow, fast)
