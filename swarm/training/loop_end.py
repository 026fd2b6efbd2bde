"""The end of a training loop of one's own, which comes once."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from shoal.optim import Alone, OuterOptimizer, Ranks
from shoal.optim.exchange.base import Exchange
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.training.last_average import (
    EndReport,
    LastAverage,
    average_at_end,
    averages_at_end,
)

log = logging.getLogger(__name__)


class LoopEnd:
    """End of a loop: with `average_at_end`, where the swarm of ``settings`` ends so.

    ``ranks``: of this peer, if it has several.
    """

    def __init__(self, settings: OuterSettings, ranks: Ranks | None) -> None:
        self._settings = settings
        self._ranks = ranks
        self.last: LastAverage | None = None
        """None in other ranks than the first, and before this node is a member."""
        self.begun = False
        self.report: EndReport | None = None
        """What the last average came to, once it is made."""

    def run(self, opt: OuterOptimizer, evaluate: Callable[[], float] | None) -> None:
        """Finish the rounds of ``opt``, average, and log what came of it.

        ``evaluate``: returns the held-out loss, nats, of the model as it is.
        """
        self.begun = True
        if not averages_at_end(self._settings) or opt.steps == 0:
            opt.finish()
            return
        self.report = self._average(opt, evaluate)

    def _average(self, opt: OuterOptimizer, evaluate: Callable[[], float] | None) -> EndReport:
        last = self.last
        exchange: Exchange = Alone() if last is None else last
        if self._ranks is not None:
            exchange = self._ranks.exchange(exchange)
            exchange.attach(opt)

        def held_out_loss() -> float | None:
            if evaluate is None:
                return None
            with opt.averaged():
                loss = float(evaluate())
            return loss if math.isfinite(loss) else None

        checked = self._settings.check_loss and evaluate is not None
        report = average_at_end(opt, last, exchange, held_out_loss, checked=checked)
        if last is not None:
            complete = report.members and not report.missing and not report.refused
            log.log(logging.INFO if complete else logging.WARNING, "%s", report.said())
        return report
