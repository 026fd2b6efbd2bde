"""Eager updates (2502.12996): the others' progress a round late, the own at once. Experimental.

    opt = Eager(inner, exchange, every=30)          # an exchange has a whole round of time

What the paper leaves open, and which rates are stable: docs/internals.md, "Eager updates".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from shoal.optim.exchange.base import Exchange
from shoal.optim.outer.inner import Inner
from shoal.optim.outer.optimizer import OuterOptimizer
from shoal.optim.outer.options import Options
from shoal.optim.outer.rule import (
    AHEAD,
    START,
    RoundContext,
    State,
    assign,
    check_rate_and_momentum,
    pseudo_gradient,
    zeros,
)
from shoal.optim.rules.diloco import outer_step
from shoal.optim.rules.stability import warn_if_unstable
from shoal.optim.schedule.schedules import Delayed

if TYPE_CHECKING:
    from typing import Unpack


@dataclass(frozen=True)
class EagerRule:
    """Rule of eager updates (2502.12996): with g = start - fast and the own share 1/K of a mean,

        e    <- g of this round / K
        G    <- mean(g of the round before) - e of the round before + e
        slow <- DiLoCo's outer step with G;   fast <- slow;   start <- slow

    The share is that of the last mean, and 1 before the first answer; so without a partner this is
    DiLoCo up to rounding. The slow weights of peers differ by their own e; ``finish(average=True)``
    equalises them at the end.
    """

    lr: float = 0.4
    momentum: float = 0.6
    nesterov: bool = True

    def __post_init__(self) -> None:
        check_rate_and_momentum(self.lr, self.momentum)

    def initial(self, slow: Sequence[Tensor]) -> State:
        """Return momentum 0, start = slow, no eager part, and share 1."""
        state = {
            START: [tensor.clone() for tensor in slow],
            AHEAD: zeros(slow),
            "share": [tensor.new_ones(()) for tensor in slow],
        }
        if self.momentum:
            state["momentum"] = zeros(slow)
        return state

    def contribution(
        self, slow: Sequence[Tensor], fast: Sequence[Tensor], state: State, context: RoundContext
    ) -> list[Tensor]:
        return pseudo_gradient(state[START], fast)

    def apply(
        self,
        slow: Sequence[Tensor],
        fast: Sequence[Tensor],
        mean: Sequence[Tensor],
        state: State,
        context: RoundContext,
    ) -> None:
        """Take one outer step.

        If the mean is not late, it holds the whole displacement and nothing is applied eagerly.
        """
        no_mean = context.members == 0
        if not no_mean:
            for share in state["share"]:
                share.fill_(context.share)
            if context.lag > 0:
                fresh = round(context.share, 2)
                warn_if_unstable(self.lr, self.momentum, 1, nesterov=self.nesterov, fresh=fresh)
        gradients = []
        for index, (e, share) in enumerate(zip(state[AHEAD], state["share"], strict=True)):
            g = -e
            if no_mean or context.lag > 0:
                e.copy_((state[START][index] - fast[index]) * share)
                g.add_(e)
            else:
                e.zero_()
            if not no_mean:
                g.add_(mean[index])
            gradients.append(g)
        outer_step(slow, gradients, state, self.lr, self.momentum, self.nesterov)
        assign(fast, slow)
        assign(state[START], slow)


class Eager(OuterOptimizer):
    """Eager updates (2502.12996): the exchange takes a whole round; the own displacement is applied
    at once (``EagerRule``).

    The paper's outer settings were not available to us. These are stable for any number of peers;
    momentum 0.9 is not.
    """

    def __init__(
        self,
        inner: Inner,
        exchange: Exchange,
        *,
        every: int = 30,
        lr: float = 0.4,
        momentum: float = 0.6,
        nesterov: bool = True,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            inner,
            exchange,
            rule=EagerRule(lr, momentum, nesterov),
            schedule=Delayed(every),
            **options,
        )
