"""What gossip methods share: whole weights, sent to a new partner each round.

    class Mine(GossipOptimizer):
        def __init__(self, inner, exchange, *, every=50, **options):
            rule = MyRule()
            super().__init__(
                inner, exchange, rule, every, fragments=None, lag="auto", options=options
            )

With a lag (inner steps from sending to applying; "auto": as soon as the mean is there) training
goes on meanwhile, and the model is sent in fragments by default. A rule ends with `move_on`:

    fast <- fast + (slow - sent)        which with lag 0 is        fast <- slow

where ``sent`` is fast when it was sent: what was learnt since is kept. (The lag is our addition:
in NoLoCo's paper a peer waits for the mean.)
"""

from __future__ import annotations

from shoal.optim.codecs.base import check_sends_weights
from shoal.optim.codecs.floats import FLOAT32
from shoal.optim.exchange.base import Exchange
from shoal.optim.methods import GOSSIP_FRAGMENTS
from shoal.optim.outer.inner import Inner
from shoal.optim.outer.optimizer import OuterOptimizer
from shoal.optim.outer.options import Fragments, Options, cut
from shoal.optim.outer.rule import Rule
from shoal.optim.schedule.schedules import Every, Lag, Schedule, Streaming


class GossipOptimizer(OuterOptimizer):
    """Base of methods that send whole weights, overlapped or not, to a new partner each round."""

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
        # ``parts`` is None for a single fragment; a lag needs Streaming even then.
        schedule: Schedule = Every(every)
        if parts or lag:
            schedule = Streaming(every, len(parts) if parts else 1, lag)
        super().__init__(inner, exchange, rule=rule, schedule=schedule, fragments=parts, **options)


def _usual_fragments(exchange: Exchange, every: int, lag: Lag) -> int:
    """Return the exchange's number; if it has none, 1 with lag 0, else 4 (at most one a step)."""
    if exchange.fragments:
        return len(exchange.fragments)
    return min(GOSSIP_FRAGMENTS, max(every, 1)) if lag else 1
