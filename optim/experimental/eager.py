"""Eager updates (arXiv 2502.12996): a peer applies its own share of a round at once, and the
others' a round later. Experimental.

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
    """Rule of eager updates (arXiv 2502.12996). Of round t, with the pseudo-gradient
    g_t = start - fast:

        e_t  = share x g_t
        G    = mean(g_{t-1}) - e_{t-1} + e_t
        slow <- DiLoCo's outer step with G;   fast <- slow;   start <- slow

    ``share`` is this peer's part of the newest mean, 1/K among K equal peers, and 1 before there is
    a mean. A peer alone is its own mean: mean(g_{t-1}) = e_{t-1} cancels, and this is DiLoCo up to
    rounding. Slow weights and momentum of peers differ, by their own e;
    `OuterOptimizer.finish` with ``average=True`` equalises the weights at the end.
    """

    lr: float = 0.4
    momentum: float = 0.6
    nesterov: bool = True

    def __post_init__(self) -> None:
        check_rate_and_momentum(self.lr, self.momentum)

    def initial(self, slow: Sequence[Tensor]) -> State:
        """Return start = slow, e and momentum 0, and share 1."""
        state = {
            START: [tensor.clone() for tensor in slow],
            AHEAD: zeros(slow),
            # One a parameter, as every part of the state is.
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

        A mean that is not late (lag 0, such as the last one of a run) is of this round and holds
        all of g_t, so e_t is 0. Without a mean there is nothing but e_t to add.
        """
        no_mean = context.members == 0
        if not no_mean:
            for share in state["share"]:
                share.fill_(context.share)
            if context.lag > 0:
                # Rounded: it warns once of each value.
                fresh = round(context.share, 2)
                warn_if_unstable(self.lr, self.momentum, 1, nesterov=self.nesterov, fresh=fresh)
        gradients = []
        for index, (e, share) in enumerate(zip(state[AHEAD], state["share"], strict=True)):
            gradient = -e
            if no_mean or context.lag > 0:
                e.copy_((state[START][index] - fast[index]) * share)
                gradient.add_(e)
            else:
                e.zero_()
            if not no_mean:
                gradient.add_(mean[index])
            gradients.append(gradient)
        outer_step(slow, gradients, state, self.lr, self.momentum, self.nesterov)
        assign(fast, slow)
        assign(state[START], slow)


class Eager(OuterOptimizer):
    """Optimizer of eager updates: `EagerRule`, and exchanges that take a whole round.

    The paper's outer settings were not available to us. The defaults are stable for any number of
    peers; momentum 0.9 is not.
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
