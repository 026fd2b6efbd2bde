"""Rounds of Unix time, on a clock that never goes back."""

from __future__ import annotations

from collections.abc import Callable

from shoal.verification.consensus.draws import Times


class RoundClock:
    """Clock of rounds of ``round_s`` seconds; if ``clock`` goes back it waits."""

    def __init__(self, clock: Callable[[], float], round_s: float) -> None:
        self.round_s = round_s
        self.times = Times.of(round_s)
        self._clock = clock
        self._latest = clock()

    def now(self) -> float:
        self._latest = max(self._latest, self._clock())
        return self._latest

    def round(self) -> int:
        return int(self.now() // self.round_s)

    def at(self, round: int, skews: int = 0) -> float:
        """Return the time at which ``round`` begins, and as many ``skew_s`` later."""
        return round * self.round_s + skews * self.times.skew_s
