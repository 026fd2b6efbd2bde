"""Local SGD, also called FedAvg: the weights become their mean over the group.

    opt = LocalSGD(inner, exchange, every=50)           # pairs: epidemic averaging

With everyone as the group, ``DiLoCo(lr=1, momentum=0)`` is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from shoal.optim.exchange.base import Exchange
from shoal.optim.methods import DEFAULT_LAG
from shoal.optim.outer.contribution_weight import equal
from shoal.optim.outer.inner import Inner
from shoal.optim.outer.options import Fragments, Options
from shoal.optim.outer.rule import RoundContext, Rule, State, assign, move_on
from shoal.optim.rules.gossip import GossipOptimizer
from shoal.optim.rules.noloco import NoLoCoRule
from shoal.optim.schedule.schedules import Lag

if TYPE_CHECKING:
    from typing import Unpack


@dataclass(frozen=True)
class LocalSGDRule:
    """Rule of local SGD / FedAvg (1602.05629, algorithm 1): the fast weights are sent, and

        slow <- mean(fast)
        fast <- slow

    The mean is plain; weighted ones are NoLoCo's rule (``LocalSGD``).
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


class LocalSGD(GossipOptimizer):
    """Local SGD / FedAvg, which replaces the weights by their mean over the group every ``every``
    inner steps (``LocalSGDRule``).

    With different weights (``weight`` given) the pseudo-gradients are weighted and the slow weights
    are not, so that the mean over all peers is conserved when they average in pairs. That is NoLoCo
    with lr 1, pull 1 and no momentum, and takes two tensors. ``fragments`` and ``lag`` as in
    ``NoLoCo``.
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
        rule: Rule = LocalSGDRule()
        if options.get("weight", equal) is not equal:
            rule = NoLoCoRule(1.0, 0.0, 1.0, weighted=True)
        super().__init__(inner, exchange, rule, every, fragments, lag, options)
