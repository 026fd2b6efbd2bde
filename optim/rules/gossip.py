"""What methods of gossip share: whole weights, sent to one partner of each round.

    class Mine(GossipOptimizer):
        def __init__(self, inner, exchange, *, every=50, **options):
            super().__init__(inner, exchange, MyRule(), every, None, "auto", options)

With a lag the model is sent in fragments while training goes on, and a rule ends with

    fast <- fast + (slow - fast as sent)        which without a lag is        fast <- slow

so that the fast weights keep what was learnt since. (Ours: the papers wait for the mean.)
"""

from __future__ import annotations

from shoal.optim.codecs.base import check_sends_weights
from shoal.optim.codecs.floats import FLOAT32
from shoal.optim.exchange.base import Exchange
from shoal.optim.methods import OVERLAPPED
from shoal.optim.outer.inner import Inner
from shoal.optim.outer.optimizer import OuterOptimizer
from shoal.optim.outer.options import Fragments, Options, cut
from shoal.optim.outer.rule import Rule
from shoal.optim.schedule.schedules import Every, Lag, Schedule, Streaming


class GossipOptimizer(OuterOptimizer):
    """Base of methods that send whole weights, overlapped or not, to a partner of each round."""

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
        if fragments is None:
            fragments = _usual_fragments(exchange, every, lag)
        parts = cut(fragments, inner, exchange, options)
        schedule: Schedule = Every(every)
        if parts or lag:
            schedule = Streaming(every, len(parts) if parts else 1, lag)
        super().__init__(inner, exchange, rule=rule, schedule=schedule, fragments=parts, **options)


def _usual_fragments(exchange: Exchange, every: int, lag: Lag) -> int:
    """Return as many as the exchange has, else one if means are applied at once."""
    if exchange.fragments:
        return len(exchange.fragments)
    return min(OVERLAPPED, max(every, 1)) if lag else 1
