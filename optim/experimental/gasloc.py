"""GASLoC (2606.11081): gossip with Nesterov's momentum on the outer iterate. Experimental.

    opt = GASLoC(inner, exchange, every=50, momentum=0.5)

Why the mean is never weighted, and what the update is equal to: docs/internals.md, "GASLoC".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from shoal.optim.exchange.base import Exchange
from shoal.optim.methods import DEFAULT_LAG
from shoal.optim.outer.inner import Inner
from shoal.optim.outer.options import Fragments, Options
from shoal.optim.outer.rule import RoundContext, State, check_rate_and_momentum, move_on, zeros
from shoal.optim.rules.gossip import GossipOptimizer
from shoal.optim.rules.stability import warn_if_unstable
from shoal.optim.schedule.schedules import Lag

if TYPE_CHECKING:
    from typing import Unpack


@dataclass(frozen=True)
class GASLoCRule:
    """GASLoC's rule (2606.11081), with outer lr b, mix a, momentum c, and plain means:

        u    <- slow + b (fast - slow)                      is sent
        slow <- u - a (u - mean(u)) + c (u - u of the round before)
        fast <- slow

    The u before the first round is the first slow weights.
    """

    # From u the fast weights as sent could be had by dividing by lr only, which may be 0.
    keeps_fast: ClassVar[bool] = True
    lr: float = 0.7
    momentum: float = 0.5
    mix: float = 1.0

    def __post_init__(self) -> None:
        check_rate_and_momentum(self.lr, self.momentum)
        if not 0 <= self.mix <= 1:
            raise ValueError(
                f"mix must lie in [0, 1], got {self.mix}: 0 never averages, 1 averages completely"
            )

    def initial(self, slow: Sequence[Tensor]) -> State:
        """Return the zero ``offset`` (slow minus the last u)."""
        return {"offset": zeros(slow)}

    def contribution(
        self, slow: Sequence[Tensor], fast: Sequence[Tensor], state: State, context: RoundContext
    ) -> list[Tensor]:
        """Return u."""
        return [s.lerp(f, self.lr) for s, f in zip(slow, fast, strict=True)]

    def unweighted_count(self, count: int) -> int:
        return count

    def apply(
        self,
        slow: Sequence[Tensor],
        fast: Sequence[Tensor],
        mean: Sequence[Tensor],
        state: State,
        context: RoundContext,
    ) -> None:
        own = context.sent if context.lag > 0 else self.contribution(slow, fast, state, context)
        for offset, s, u, mean_u in zip(state["offset"], slow, own, mean, strict=True):
            # With the old offset, u - s + offset is u - u of the round before.
            offset.add_(u - s).mul_(self.momentum)
            offset.add_(mean_u - u, alpha=self.mix)
            s.copy_(u).add_(offset)
        move_on(fast, slow, context.fast, context.lag)


class GASLoC(GossipOptimizer):
    """GASLoC (2606.11081): gossip with momentum on the outer iterate (``GASLoCRule``).

    The defaults are those of NoLoCo's paper; its own paper's were not available to us.
    ``fragments`` and ``lag`` as in ``NoLoCo``.
    """

    def __init__(
        self,
        inner: Inner,
        exchange: Exchange,
        *,
        every: int = 50,
        lr: float = 0.7,
        momentum: float = 0.5,
        mix: float = 1.0,
        fragments: Fragments | None = None,
        lag: Lag = DEFAULT_LAG,
        **options: Unpack[Options],
    ) -> None:
        warn_if_unstable(lr, momentum, 0, nesterov=True)
        rule = GASLoCRule(lr, momentum, mix)
        super().__init__(inner, exchange, rule, every, fragments, lag, options)
