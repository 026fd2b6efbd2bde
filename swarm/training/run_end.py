"""The end of a run or of a loop of one's own, which comes once: with the last average
(`shoal.swarm.training.last_average`), where the swarm ends so.

    end = RunEnd(averages=averages_at_end(settings))
    end.last = LastAverage(membership, settings, opt.fragments, model)
    end.run(opt, evaluate)
    print(end.report.said())
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.optim import Alone, OuterOptimizer
from shoal.optim.exchange.base import Exchange
from shoal.optim.outer.weights import Processes
from shoal.swarm.training.last_average import EndReport, LastAverage

MAX_ADDED_LOSS_SHARE = 0.01
"""Share of its held-out loss that a node of a swarm with ``check_loss`` lets the mean add before it
keeps its own weights.
"""


class RunEnd:
    """The end of one peer's training.

    Args:
        averages: end with the last average.
        ranks: of this peer, if it has several.
    """

    def __init__(self, *, averages: bool = False, ranks: Processes | None = None) -> None:
        self.averages = averages
        self._ranks = ranks
        self.last: LastAverage | None = None
        """None in other ranks than the first, and before this node is a member."""
        self.begun = False
        self.report: EndReport | None = None
        """What the last average came to, once it is made."""

    def hurry(self, seconds: float) -> None:
        """Let the average take ``seconds`` from now at most. Callable from a signal handler."""
        if self.last is not None:
            self.last.hurry(seconds)

    def run(
        self,
        opt: OuterOptimizer,
        held_out_loss: Callable[[], float | None],
        *,
        checked: bool = False,
    ) -> None:
        """Finish the rounds of ``opt``, after its last step, and average with all members that are
        there.

        Args:
            held_out_loss: returns that of the slow weights, nats, or None; called before and after.
            checked: keep this node's own weights if the mean raises that loss (`allowed`).
        """
        self.begun = True
        if self.averages and opt.steps > 0:
            self.report = self._average(opt, held_out_loss, checked=checked)
        else:
            opt.finish()

    def _average(
        self, opt: OuterOptimizer, held_out_loss: Callable[[], float | None], *, checked: bool
    ) -> EndReport:
        last = self.last
        exchange: Exchange = Alone() if last is None else last
        if self._ranks is not None:
            exchange = self._ranks.exchange(exchange)
            exchange.attach(opt)
        opt.settle()
        if last is not None:
            last.begin()  # before the evaluation, which may take longer than others wait
        report = EndReport() if last is None else last.report
        report.loss_before = held_out_loss()

        def taken() -> bool:
            report.loss_after = held_out_loss()
            report.refused = not allowed(report.loss_before, report.loss_after)
            return not report.refused

        enough = bool if last is None else last.enough
        members = opt.average_over(exchange, enough=enough, accept=taken if checked else None)
        if members and not checked:
            report.loss_after = held_out_loss()
        return report


def allowed(before: float | None, after: float | None) -> bool:
    """Return whether a node with ``check_loss`` takes a mean that changes its held-out loss so; not
    if that is not finite.
    """
    if before is None:
        return True
    return after is not None and after <= before + MAX_ADDED_LOSS_SHARE * abs(before)
