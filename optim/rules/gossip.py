"""Rules that average weights with few peers, without a sum over everyone: local SGD and NoLoCo.

Each may be applied some steps after its contribution was sent (ours: the papers wait for the mean).
The slow weights then follow the same formula, with the contribution as it was sent, and the fast
weights keep what was learnt since:

    fast <- fast + (slow - fast as sent)        which without a lag is        fast <- slow

Below the rules are the optimizers made of them, with documented defaults; ``Options`` are the
arguments that all methods share.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from shoal.optim.codecs.base import FLOAT32, check_sends_weights
from shoal.optim.exchange.base import Exchange, OnDemand
from shoal.optim.methods import DEFAULT_LAG, OVERLAPPED
from shoal.optim.outer.fragments import equal
from shoal.optim.outer.inner import Inner
from shoal.optim.outer.optimizer import Fragments, Options, OuterOptimizer, cut
from shoal.optim.outer.rule import (
    RoundContext,
    Rule,
    State,
    assign,
    check_rate_and_momentum,
    move_on,
    zeros,
)
from shoal.optim.rules.diloco import warn_if_unstable
from shoal.optim.schedule import Every, Lag, Streaming

if TYPE_CHECKING:
    from typing import Unpack


@dataclass(frozen=True)
class NoLoCoRule:
    """NoLoCo's rule (2506.10911v1, Eq. 1-3) in the form of the authors' code, whose sign of the
    second term is the descending one.

    With g = slow - fast, momentum a, outer lr b and pull c, means taken over the group:

        v <- a v + b mean(g) + c (slow - mean(slow));   slow <- slow - v;   fast <- slow

    This is heavy ball, not Nesterov. When c = b (as in the authors' runs; the paper gives no value)
    the two terms collapse to b (slow - mean(fast)): only the fast weights are sent, half the bytes.
    Otherwise g and slow are both sent.

    ``weighted``: peers contribute with different weights. Only mean(g) is weighted then; mean(slow)
    stays a plain mean, so that the pull moves the members by opposite amounts and the mean over all
    peers is conserved (ours: the paper has no weights). That needs both tensors, whatever the pull.
    All peers must agree on it.

    The replicas' consensus distance contracts for 0 < c < 2 (1 - a^2) with pairs (our derivation;
    the paper's Eq. 74 recommends values that diverge for a = 0.9); other values cause a warning.
    """

    lr: float = 1.0
    momentum: float = 0.3
    pull: float | None = None
    """None: equal to ``lr``."""
    weighted: bool = False

    def __post_init__(self) -> None:
        check_rate_and_momentum(self.lr, self.momentum)
        if not self.gamma >= 0:
            raise ValueError(f"pull must not be negative, got {self.gamma}")
        limit = 2 * (1 - self.momentum**2)
        if self.gamma >= limit and self.gamma != 0:
            warnings.warn(
                f"pull {self.gamma:g} with momentum {self.momentum:g} lets the peers drift apart: "
                f"keep pull below {limit:g} "
                "or lower the momentum",
                stacklevel=3,
            )

    @property
    def gamma(self) -> float:
        """The pull towards the group's mean slow weights."""
        return self.lr if self.pull is None else self.pull

    @property
    def sends_weights_only(self) -> bool:
        """True in the one-tensor form."""
        return self.gamma == self.lr and not self.weighted

    def initial(self, slow: Sequence[Tensor]) -> State:
        return {"momentum": zeros(slow)}

    def contribution(
        self, slow: Sequence[Tensor], fast: Sequence[Tensor], state: State, context: RoundContext
    ) -> OnDemand:
        """Return ``fast`` in the one-tensor form, else ``slow``, then the pseudo-gradients."""
        return OnDemand(fast if self.sends_weights_only else [*slow, *zip(slow, fast, strict=True)])

    def even(self, count: int) -> int:
        return 0 if self.sends_weights_only else count // 2

    def apply(
        self,
        slow: Sequence[Tensor],
        fast: Sequence[Tensor],
        mean: Sequence[Tensor],
        state: State,
        context: RoundContext,
    ) -> None:
        velocity = state["momentum"]
        if self.sends_weights_only:
            for v, s, mean_fast in zip(velocity, slow, mean, strict=True):
                v.mul_(self.momentum).add_(s - mean_fast, alpha=self.lr)
                s.sub_(v)
        else:
            count = len(slow)
            for v, s, mean_slow, g in zip(velocity, slow, mean[:count], mean[count:], strict=True):
                v.mul_(self.momentum).add_(g, alpha=self.lr)
                if (
                    context.members > 1 or context.weight == 0
                ):  # without a partner there is no pull, nor must rounding be one
                    v.add_(s - mean_slow, alpha=self.gamma)
                s.sub_(v)
        sent = context.sent
        weights = (
            sent
            if self.sends_weights_only
            else (s - g for s, g in zip(sent[: len(slow)], sent[len(slow) :], strict=True))
        )
        move_on(fast, slow, weights, context.lag)


@dataclass(frozen=True)
class LocalSGDRule:
    """Rule of local SGD / FedAvg: slow weights become the mean of the fast weights.

    With pairs: epidemic averaging.
    """

    def initial(self, slow: Sequence[Tensor]) -> State:
        return {}

    def contribution(
        self, slow: Sequence[Tensor], fast: Sequence[Tensor], state: State, context: RoundContext
    ) -> list[Tensor]:
        return list(fast)

    def apply(
        self,
        slow: Sequence[Tensor],
        fast: Sequence[Tensor],
        mean: Sequence[Tensor],
        state: State,
        context: RoundContext,
    ) -> None:
        assign(slow, mean)
        move_on(fast, slow, context.sent, context.lag)


class GossipOptimizer(OuterOptimizer):
    """Method that sends whole weights, overlapped or not, to a partner of each round."""

    def __init__(
        self,
        inner: Inner,
        exchange: Exchange,
        rule: Rule,
        every: int,
        fragments: Fragments | None,
        lag: Lag,
        options: Options,
    ) -> None:
        check_sends_weights(options.get("codec", FLOAT32), type(self).__name__)
        if fragments is None:  # as the exchange has them, or one if means are applied at once
            fragments = (
                len(exchange.fragments)
                if exchange.fragments
                else min(OVERLAPPED, max(every, 1))
                if lag
                else 1
            )
        parts = cut(fragments, inner, exchange, options)
        schedule = (
            Streaming(every, len(parts) if parts else 1, lag) if parts or lag else Every(every)
        )
        super().__init__(inner, exchange, rule=rule, schedule=schedule, fragments=parts, **options)


class NoLoCo(GossipOptimizer):
    """NoLoCo (2506.10911), which averages with one random peer every ``every`` inner steps
    (``NoLoCoRule``).

    With a ``lag`` nobody waits: the model is sent in ``fragments`` (4 by default), one after
    another and each to a partner of its own, and a mean is applied ``lag`` inner steps after it was
    sent; the fast weights keep what was learnt since. "auto": as soon as it is there (``AutoLag``),
    which may differ between peers. lag 0: the whole model (unless in ``fragments``), waited for.

    The paper's rate and momentum are 0.7 and 0.5; the defaults ended lower in what was measured
    (docs/methods.md). ``pull=None`` means equal to ``lr``: then one tensor per parameter is sent,
    unless peers have different weights (``weight`` given), which takes two: the pseudo-gradients
    are weighted, the pull is not.
    """

    def __init__(
        self,
        inner: Inner,
        exchange: Exchange,
        *,
        every: int = 50,
        lr: float = 1.0,
        momentum: float = 0.3,
        pull: float | None = None,
        fragments: Fragments | None = None,
        lag: Lag = DEFAULT_LAG,
        **options: Unpack[Options],
    ) -> None:
        rule = NoLoCoRule(lr, momentum, pull, weighted=options.get("weight", equal) is not equal)
        warn_if_unstable(lr, momentum, 0, nesterov=False)
        super().__init__(inner, exchange, rule, every, fragments, lag, options)


class LocalSGD(GossipOptimizer):
    """Local SGD / FedAvg, which replaces the weights by their mean over the group every ``every``
    inner steps.

    With different weights (``weight`` given) the pseudo-gradients are weighted and the slow weights
    are not, so that the mean over all peers is conserved when they average in pairs. That is NoLoCo
    with lr 1, pull 1 and no momentum, and takes two tensors. If the group is everyone, all start
    equal, and ``DiLoCo(lr=1, momentum=0)`` is the same with one tensor. ``fragments`` and ``lag``
    as in ``NoLoCo``.
    """

    def __init__(
        self,
        inner: Inner,
        exchange: Exchange,
        *,
        every: int = 50,
        fragments: Fragments | None = None,
        lag: Lag = DEFAULT_LAG,
        **options: Unpack[Options],
    ) -> None:
        weighted = options.get("weight", equal) is not equal
        rule = NoLoCoRule(1.0, 0.0, 1.0, weighted=True) if weighted else LocalSGDRule()
        super().__init__(inner, exchange, rule, every, fragments, lag, options)
