"""A lag that is found by watching: each exchange is applied once it is there; how long nearly all take is what is reported.

It needs no clock. An exchange in flight is polled between steps, so when it arrives is known in positions of the schedule, the unit
in which it is applied. (Ours.)

Arrivals may differ much, as a partner that is behind sends later. Were all of them applied as late as nearly the latest, the peers
that are ahead would train on means of a whole round ago, and gain nothing by it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal

Lag = int | Literal["auto"]
"""Positions between sending and applying; "auto": as ``AutoLag`` finds."""

WINDOW = 24
"""Exchanges that are remembered."""


class AutoLag:
    """The lag to expect of the next exchange, from the arrivals of the last ones that had a partner.

    Of ``WINDOW`` arrivals two may be later, of four one. On the latest of the others comes an eighth as a margin. Before the first
    arrival it is 1, and never more than ``every``.

    ValueError if ``every`` is below 1.
    """

    def __init__(self, every: int) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1 inner step, got {every}")
        self.every = every
        self._arrivals: deque[int] = deque(maxlen=WINDOW)

    @property
    def lag(self) -> int:
        """The lag in positions, from 1 to ``every``."""
        if not self._arrivals:
            return 1
        late = (len(self._arrivals) + 8) // 12
        latest = sorted(self._arrivals)[-1 - late]
        return min(latest + latest // 8, self.every)

    @property
    def least(self) -> int:
        """The least of the last arrivals, from which on it is worth asking whether an exchange is there; 1 before the first."""
        return min(self._arrivals, default=1)

    def observe(self, positions: int) -> None:
        """Remember that an exchange was there so many positions after it was sent; one that was waited for: when the wait began."""
        self._arrivals.append(min(max(positions, 1), self.every))

    def state(self) -> list[int]:
        """Return what is remembered, the oldest first."""
        return list(self._arrivals)

    def restore(self, arrivals: Sequence[int]) -> None:
        """Go on from what ``state`` returned, with another ``every`` too. ValueError if an arrival is no number; unchanged then."""
        found = [int(positions) for positions in arrivals]
        self._arrivals.clear()
        for positions in found:
            self.observe(positions)
