"""Streaming DiLoCo (2501.18512): DiLoCo of one fragment at a time, sent while training goes on.

    opt = StreamingDiLoCo(inner, exchange, every=100, fragments=4, model=model)
    with opt.averaged():                    # the slow weights are better than any peer's fast ones
        evaluate(model)

Where the defaults differ from the paper, and why: docs/internals.md, "Streaming DiLoCo".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from shoal.optim.exchange.base import Exchange
from shoal.optim.methods import DEFAULT_LAG
from shoal.optim.outer.inner import Inner
from shoal.optim.outer.optimizer import OuterOptimizer
from shoal.optim.outer.options import Fragments, Options, cut
from shoal.optim.rules.diloco import DiLoCoRule
from shoal.optim.rules.stability import warn_if_unstable
from shoal.optim.schedule.schedules import Lag, SentAhead, Streaming

if TYPE_CHECKING:
    from typing import Unpack


class StreamingDiLoCo(OuterOptimizer):
    """Streaming DiLoCo (2501.18512, algorithm 2): each fragment is sent once in ``every`` inner
    steps, and its mean applied ``lag`` steps later (``DiLoCoRule``, ``Streaming``).

    Args:
        inner: the inner optimizer.
        exchange: the exchange with other peers.
        every: inner steps between two exchanges of one fragment.
        fragments: how many to cut ``model`` into, strided by layer; or a list of modules (or of
            lists of modules and parameters), the same on all peers. Without ``model``, on all
            peers, that number of lists of about equally many values, whatever the layer.
        lag: inner steps; "auto": as soon as a mean is there (``AutoLag``).
        phase: "send", or "apply": a fragment's step is that of its mean (``SentAhead``).
        mix: "keep", or the part of the fast weights that stays (``DiLoCoRule``).
        lr: outer learning rate.
        momentum: outer momentum, each fragment's its own.
        options: as for all methods.
    """

    def __init__(
        self,
        inner: Inner,
        exchange: Exchange,
        *,
        every: int = 100,
        fragments: Fragments = 4,
        lag: Lag = DEFAULT_LAG,
        phase: Literal["send", "apply"] = "send",
        mix: float | Literal["keep"] = "keep",
        lr: float = 0.7,
        momentum: float = 0.6,
        **options: Unpack[Options],
    ) -> None:
        parts = cut(fragments, inner, exchange, options)
        warn_if_unstable(lr, momentum, 0, nesterov=True)
        if phase not in ("send", "apply"):
            raise ValueError(f"phase must be send or apply, got {phase!r}")
        timing = SentAhead if phase == "apply" else Streaming
        schedule = timing(every, len(parts) if parts else 1, lag)
        super().__init__(
            inner,
            exchange,
            rule=DiLoCoRule(lr, momentum, mix=mix),
            schedule=schedule,
            fragments=parts,
            **options,
        )
