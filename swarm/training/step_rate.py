"""How fast a node trains, without the time spent waiting for others."""

from __future__ import annotations

import time
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


class LoopSpeed:
    """The speed of a loop of one's own between two looks, without what it waited for others."""

    def __init__(self) -> None:
        self._rates = Rates()
        self._step_rate = StepRate()
        self._token_rate = StepRate()
        # As of the last look.
        self._looked_at = 0.0
        self._steps = 0
        self._tokens = 0
        self._waited_s = 0.0

    def look(self, steps: int, tokens: int, waited_s: float) -> Rates:
        """Return the recent speed; steps, tokens and seconds of waiting are totals."""
        if steps > self._steps:
            busy_s = self.since_look() - (waited_s - self._waited_s)
            self._rates = Rates(
                self._step_rate.add(steps - self._steps, busy_s),
                self._token_rate.add(tokens - self._tokens, busy_s),
            )
            self._tokens = tokens
        self._looked_at = time.monotonic()
        self._steps = steps
        self._waited_s = waited_s
        return self._rates

    def restart(self, steps: int, tokens: int, waited_s: float) -> None:
        """Count from these totals, such as those of a loaded state."""
        self._looked_at = time.monotonic()
        self._steps = steps
        self._tokens = tokens
        self._waited_s = waited_s

    def since_look(self) -> float:
        """Return the seconds since the last look."""
        return time.monotonic() - self._looked_at
