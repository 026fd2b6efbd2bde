"""The lag to expect of an exchange, found by watching how long the last ones took.

    lag = AutoLag(every=100)
    lag.observe(7)                   # an exchange was there 7 positions after it was sent
    lag.lag                          # 7: what nearly all take

It reports and does not decide: each mean is applied once it is there. Why: docs/internals.md, "A
lag found by watching".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from shoal.optim.schedule.schedules import check_every

WINDOW = 24
"""Exchanges that are remembered: six rounds of four fragments."""
MARGIN_DIVISOR = 8
"""The margin is this part of the latest usual arrival: an eighth."""


class AutoLag:
    """The lag to expect of the next exchange, from the arrivals of the last ones that had a
    partner.

    Of ``WINDOW`` arrivals two may be later, of four one. On the latest of the others comes an
    eighth as a margin. Before the first arrival it is 1, and never more than ``every``.

    ValueError if ``every`` is below 1.
    """

    def __init__(self, every: int) -> None:
        check_every(every)
        self.every = every
        self._arrivals: deque[int] = deque(maxlen=WINDOW)

    @property
    def lag(self) -> int:
        """The lag in positions, from 1 to ``every``."""
        if not self._arrivals:
            return 1
        late = (len(self._arrivals) + 8) // 12
        latest = sorted(self._arrivals)[-1 - late]
        return min(latest + latest // MARGIN_DIVISOR, self.every)

    @property
    def least(self) -> int:
        """The least of the last arrivals, from which on it is worth asking whether an exchange is
        there; 1 before the first.
        """
        return min(self._arrivals, default=1)

    def observe(self, positions: int) -> None:
        """Remember that an exchange was there so many positions after it was sent; one that was
        waited for: when the wait began.
        """
        self._arrivals.append(min(max(positions, 1), self.every))

    def state(self) -> list[int]:
        return list(self._arrivals)

    def restore(self, arrivals: Sequence[int]) -> None:
        """Go on from what ``state`` returned, with another ``every`` too.

        ValueError if an arrival is no number; unchanged then.
        """
        numbers = [int(positions) for positions in arrivals]
        self._arrivals.clear()
        for positions in numbers:
            self.observe(positions)
