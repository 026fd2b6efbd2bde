"""DiLoCo (2311.08105): SGD with momentum on the slow weights, along the mean pseudo-gradient.

    opt = DiLoCo(inner, exchange, every=500, lr=0.7, momentum=0.6)

What the rule becomes in special cases: docs/internals.md, "DiLoCo".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor

from shoal.optim.exchange.base import Exchange
from shoal.optim.exchange.on_demand import OnDemand, differences
from shoal.optim.outer.inner import Inner
from shoal.optim.outer.optimizer import OuterOptimizer
from shoal.optim.outer.options import Options
from shoal.optim.outer.rule import RoundContext, State, check_rate_and_momentum, zeros
from shoal.optim.rules.stability import warn_if_unstable
from shoal.optim.schedule.schedules import Every

if TYPE_CHECKING:
    from typing import Unpack


@dataclass(frozen=True)
class DiLoCoRule:
    """DiLoCo's rule (2311.08105, algorithm 1): with g = slow - fast, momentum m and outer lr b,

        G    <- mean(g)
        v    <- m v + G
        slow <- slow - b (G + m v)      if ``nesterov``, else      slow - b v      (heavy ball)
        fast <- slow                    or by ``mix``

    ``mix`` is what becomes of the progress made while the exchange was in flight (Streaming DiLoCo,
    2501.18512, section 3): fast <- mix fast + (1 - mix) slow. 0 discards it, 1 ignores the others.
    "keep" (ours) discards nothing: fast <- fast + (slow - fast when it was sent).
    """

    shared: ClassVar[tuple[str, ...]] = ("momentum",)
    lr: float = 0.7
    momentum: float = 0.6
    nesterov: bool = True
    mix: float | Literal["keep"] = 0.0

    def __post_init__(self) -> None:
        check_rate_and_momentum(self.lr, self.momentum)
        if self.mix != "keep" and (isinstance(self.mix, str) or not 0 <= self.mix <= 1):
            raise ValueError(
                f"mix must be keep or lie in [0, 1], got {self.mix}: 0 takes the slow weights, 1 "
                "keeps the fast ones"
            )

    def initial(self, slow: Sequence[Tensor]) -> State:
        """Return momentum 0; no buffer without momentum."""
        return {"momentum": zeros(slow)} if self.momentum else {}

    def contribution(
        self, slow: Sequence[Tensor], fast: Sequence[Tensor], state: State, context: RoundContext
    ) -> OnDemand:
        """Return the pseudo-gradient."""
        return differences(slow, fast)

    def apply(
        self,
        slow: Sequence[Tensor],
        fast: Sequence[Tensor],
        mean: Sequence[Tensor],
        state: State,
        context: RoundContext,
    ) -> None:
        keeps = self.mix == "keep" and context.lag > 0
        if keeps:
            # What was learnt since it was sent: exactly 0 if nothing was.
            for f, s, g in zip(fast, slow, context.sent, strict=True):
                f.sub_(s).add_(g)
        outer_step(slow, mean, state, self.lr, self.momentum, self.nesterov)
        for s, f in zip(slow, fast, strict=True):
            if keeps:
                f.add_(s)
            elif self.mix == "keep" or self.mix == 0:
                f.copy_(s)
            elif self.mix < 1:
                f.mul_(self.mix).add_(s, alpha=1 - self.mix)


def outer_step(
    slow: Sequence[Tensor],
    gradients: Sequence[Tensor],
    state: State,
    lr: float,
    momentum: float,
    nesterov: bool,
) -> None:
    """Take a step of SGD with momentum in torch's form on ``slow``, in place; ``gradients`` are not
    changed.
    """
    if momentum == 0:
        for s, g in zip(slow, gradients, strict=True):
            s.sub_(g, alpha=lr)
        return
    for v, s, g in zip(state["momentum"], slow, gradients, strict=True):
        v.mul_(momentum).add_(g)
        if nesterov:
            s.sub_(g, alpha=lr).sub_(v, alpha=lr * momentum)
        else:
            s.sub_(v, alpha=lr)


class DiLoCo(OuterOptimizer):
    """DiLoCo (2311.08105); ``nesterov=False`` is its heavy-ball form (``DiLoCoRule``).

    The paper's outer momentum is 0.9; the default ended lower in what was measured, in 10 to 300
    rounds (docs/methods.md). The best lr rises with the number of peers (2503.09799: 0.4 for 1, 0.6
    for 2 to 4, 0.8 for 8); a short ``every`` requires less momentum.
    """

    def __init__(
        self,
        inner: Inner,
        exchange: Exchange,
        *,
        every: int = 500,
        lr: float = 0.7,
        momentum: float = 0.6,
        nesterov: bool = True,
        **options: Unpack[Options],
    ) -> None:
        warn_if_unstable(lr, momentum, 0, nesterov=nesterov)
        super().__init__(
            inner,
            exchange,
            rule=DiLoCoRule(lr, momentum, nesterov),
            schedule=Every(every),
            **options,
        )
