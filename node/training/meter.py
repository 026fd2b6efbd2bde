"""What is measured while a trainer runs: how fast it trains, and its training loss.

meter.restart(waited_s)              # when training begins
meter.add(loss)                      # after each step
if meter.is_due():
    progress = meter.report(step, waited_s)
    meter.restart(waited_s)
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from shoal.node.training.loss_rise import LossRise
from shoal.node.training.throughput import Throughput
from shoal.node.training.training_error import DivergedError
from shoal.swarm.training.step_rate import Rates

REPORT_S = 0.5
"""Between two reports of progress."""


@dataclass(frozen=True)
class Progress:
    """The progress of training."""

    step: int
    loss: float
    """Mean training loss since the last report, nats."""
    rates: Rates
    """Over the last reports."""


class _MeanLoss:
    """A running mean that stays on the device until it is read: each reading makes a GPU wait."""

    def __init__(self) -> None:
        self._sum: torch.Tensor | float = 0.0
        self._count = 0

    def add(self, loss: torch.Tensor) -> None:
        self._sum = self._sum + loss.detach()
        self._count += 1

    def take(self) -> float | None:
        """Return the mean since the last call, and begin anew; None without a loss."""
        if not self._count:
            return None
        mean = float(self._sum) / self._count
        self._sum = 0.0
        self._count = 0
        return mean


class Meter:
    """The throughput and the training loss of one run.

    ``waited_s``: seconds that the run has waited for others in all, which count as no training.
    """

    def __init__(self, throughput: Throughput) -> None:
        self.throughput = throughput
        self._recent = _MeanLoss()
        self._of_round = _MeanLoss()
        self.rise = LossRise()
        self._loss = 0.0
        self._since = 0.0
        self._waited_before_s = 0.0

    def restart(self, waited_s: float) -> None:
        """Have the time of the next report begin now."""
        self._since = time.monotonic()
        self._waited_before_s = waited_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count what is done within as no training, such as saving and evaluating."""
        before = time.monotonic()
        yield
        self._since += time.monotonic() - before

    def add(self, loss: torch.Tensor) -> None:
        """Note the training loss of a step."""
        self._recent.add(loss)
        self._of_round.add(loss)
        self.rise.add(loss)

    def is_due(self) -> bool:
        """Return whether it is time for a report."""
        return time.monotonic() - self._since >= REPORT_S

    def report(self, step: int, waited_s: float) -> Progress:
        """Return the progress since the last report. DivergedError if the loss is not finite."""
        recent = self._recent.take()  # a GPU has caught up then
        if recent is not None:  # else all steps were skipped (float16)
            self._loss = _finite(recent, step)
        return Progress(step, self._loss, self._rates(waited_s))

    def end(self, waited_s: float) -> None:
        """Note that the last step was taken."""
        self._recent.take()  # waits for a GPU
        self._rates(waited_s)

    def round_loss(self, step: int) -> float | None:
        """Return the mean training loss since the last call, nats; None without a step.

        DivergedError if it is not finite.
        """
        loss = self._of_round.take()
        return None if loss is None else _finite(loss, step)

    def _rates(self, waited_s: float) -> Rates:
        waited = waited_s - self._waited_before_s
        return self.throughput.report(time.monotonic() - self._since - waited)


def _finite(loss: float, step: int) -> float:
    if not math.isfinite(loss):
        remedy = "lower the task's learning rate (`shoal tune` finds one)"
        if math.isnan(loss):
            remedy += (
                ", or have loss() return 0 for a batch in which every label is masked, "
                "whose mean is nan"
            )
        raise DivergedError(f"The training loss became {loss} by step {step}: {remedy}.")
    return loss
