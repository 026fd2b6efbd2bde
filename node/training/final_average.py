"""The average of all members' weights with which a run ends, where the swarm wants one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal.optim import Exchange, OuterOptimizer
from shoal.swarm.training.last_average import EndReport, LastAverage, average_at_end


@dataclass
class FinalAverage:
    """The exchange of the last average, and what came of it; empty in a run that ends without."""

    exchange: Exchange | None = None
    """``last`` as this process has it; None: the run ends without."""
    last: LastAverage | None = None
    """Of a node of several processes rank 0 has it."""
    report: EndReport | None = None
    """What the average came to, once there was one."""

    def loss(self) -> float | None:
        """Return the held-out loss of the model that the average left, nats, if it is known."""
        if self.report is None:
            return None
        if self.report.members and not self.report.refused:
            return self.report.loss_after
        return self.report.loss_before

    def hurry(self, seconds: float) -> None:
        """Let the average take ``seconds`` from now at most."""
        if self.last is not None:
            self.last.hurry(seconds)

    def run(
        self, opt: OuterOptimizer, held_out_loss: Callable[[], float | None], *, checked: bool
    ) -> None:
        """Average the weights of ``opt``, after its last step (`average_at_end`)."""
        assert self.exchange is not None
        self.report = average_at_end(opt, self.last, self.exchange, held_out_loss, checked=checked)
