"""Budget of checking: some seconds of a node's time in each minute, saved up for one minute at most."""

from __future__ import annotations

from collections.abc import Callable

MINUTE = 60.0


class Budget:
    """Time budget of ``seconds`` in each minute; ``clock``: seconds. A check that was begun is finished, so it may be overdrawn."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._rate, self._most, self._clock = seconds / MINUTE, seconds, clock
        self._left, self._since = seconds, clock()
        self.spent = 0.0

    @property
    def is_open(self) -> bool:
        """True if a check may begin now."""
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._since) * self._rate)
        self._since = now
        return self._left > 0

    def spend(self, seconds: float) -> None:
        """Charge the seconds of a check."""
        self.spent += seconds
        self._left -= seconds
