"""What a training loop of one's own tells others of its speed and loss, and how often."""

from __future__ import annotations

from shoal.optim import OuterOptimizer
from shoal.swarm.training.member import TrainingMember
from shoal.swarm.training.step_rate import LoopSpeed

ANNOUNCE_S = 1.0
"""Between two reports within a round."""


class LoopReport:
    """Report of a loop: due in each new round, and each second within one."""

    def __init__(self) -> None:
        self.loss: float | None = None
        """Of training, nats, as the loop said it last."""
        self._speed = LoopSpeed()
        # As of the last report.
        self._round = -1

    def is_due(self, opt: OuterOptimizer) -> bool:
        return opt.round != self._round or self._speed.since_look() >= ANNOUNCE_S

    def restart(self, opt: OuterOptimizer, member: TrainingMember) -> None:
        """Count from the steps of a state that was loaded: they were not made here."""
        self._speed.restart(opt.steps, opt.tokens, member.exchange.waited)

    def write(self, opt: OuterOptimizer, member: TrainingMember) -> None:
        """Put it into the records of ``member``, which are announced with the next status."""
        member.records.lost(training=self.loss)
        member.records.rates = self._speed.look(opt.steps, opt.tokens, member.exchange.waited)
        self._round = opt.round
