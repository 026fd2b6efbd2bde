"""NoLoCo (2506.10911): heavy ball on the slow weights, averaged with one random peer a round.

    opt = NoLoCo(inner, exchange, every=25)                  # in fragments, overlapped
    opt = NoLoCo(inner, exchange, every=25, lag=0)           # the paper's: waits for the partner

Which form of the paper's equations this is, and which pull is stable: docs/internals.md, "NoLoCo".
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from shoal.optim.exchange.base import Exchange
from shoal.optim.exchange.on_demand import OnDemand
from shoal.optim.methods import DEFAULT_LAG
from shoal.optim.outer.contribution_weight import equal
from shoal.optim.outer.inner import Inner
from shoal.optim.outer.options import Fragments, Options
from shoal.optim.outer.rule import RoundContext, State, check_rate_and_momentum, move_on, zeros
from shoal.optim.rules.gossip import GossipOptimizer
from shoal.optim.rules.stability import warn_if_unstable
from shoal.optim.schedule.schedules import Lag

if TYPE_CHECKING:
    from typing import Unpack


@dataclass(frozen=True)
class NoLoCoRule:
    """NoLoCo's rule (2506.10911v1, equations 1 to 3): with g = slow - fast, momentum a, outer lr b,
    pull c, and means over the group,

        v    <- a v + b mean(g) + c (slow - mean(slow))
        slow <- slow - v
        fast <- slow

    With c = b the two terms collapse to b (slow - mean(fast)): only the fast weights are sent, half
    the bytes. Otherwise slow and g are both sent.

    ``weighted``: peers contribute with different weights, on which all of them must agree. Then
    only mean(g) is weighted, and both tensors are sent whatever the pull.
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
                f"keep pull below {limit:g} or lower the momentum",
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
        if self.sends_weights_only:
            return OnDemand(fast)
        return OnDemand([*slow, *zip(slow, fast, strict=True)])

    def unweighted_count(self, count: int) -> int:
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
        count = len(slow)
        sent_fast: Iterable[Tensor] = context.sent
        if self.sends_weights_only:
            for v, s, mean_fast in zip(velocity, slow, mean, strict=True):
                v.mul_(self.momentum).add_(s - mean_fast, alpha=self.lr)
                s.sub_(v)
        else:
            # Without a partner there is no pull, nor must rounding be one.
            pulled = context.members > 1 or context.weight == 0
            for v, s, mean_slow, g in zip(velocity, slow, mean[:count], mean[count:], strict=True):
                v.mul_(self.momentum).add_(g, alpha=self.lr)
                if pulled:
                    v.add_(s - mean_slow, alpha=self.gamma)
                s.sub_(v)
            sent = zip(context.sent[:count], context.sent[count:], strict=True)
            sent_fast = (s - g for s, g in sent)
        move_on(fast, slow, sent_fast, context.lag)


class NoLoCo(GossipOptimizer):
    """NoLoCo (2506.10911), which averages with one random peer every ``every`` inner steps
    (``NoLoCoRule``).

    With a ``lag`` nobody waits: the model is sent in ``fragments`` (4 by default), one after
    another and each to a partner of its own, and a mean is applied ``lag`` inner steps after it was
    sent. "auto": as soon as it is there (``AutoLag``), which may differ between peers. lag 0: the
    whole model (unless in ``fragments``), waited for.

    The paper's rate and momentum are 0.7 and 0.5; the defaults ended lower in what was measured
    (docs/methods.md). ``pull=None`` means equal to ``lr``.
    """

    def __init__(
        self,
        inner: Inner,
        exchange: Exchange,
        *,
        every: int = 25,
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
