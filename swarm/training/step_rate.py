"""How fast a node trains, without the time spent waiting for others."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median_high

MAX_REPORTS = 20
"""Over which the speed is measured."""


@dataclass(frozen=True)
class Rates:
    """Speed of training, without the time spent waiting for others."""

    steps_per_s: float = 0.0
    tokens_per_s: float = 0.0
    mfu: float | None = None
    """Share of the device's peak, of 1; None where the peak is not known."""


class StepRate:
    """The usual number of inner steps, or of tokens, a second: the median of the last reports.

    The first report, which includes compilation, and one in which the machine slept count little.
    """

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=MAX_REPORTS)

    def add(self, amount: int, seconds: float) -> float:
        """Add a report of ``amount`` inner steps or tokens in ``seconds``, without waiting for
        others, and return the speed.
        """
        if seconds > 0:
            self._rates.append(amount / seconds)
        return median_high(self._rates) if self._rates else 0.0
