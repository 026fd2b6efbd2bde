"""A budget of bytes in a second that all streams of a host share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PIECE_S = 0.1  # seconds of the budget that are sent at once
BURST_S = 0.25  # seconds of it that may be saved up


class Pace:
    """``rate`` bytes in a second (above 0). What must not wait is spent, and owed; what can waits until nothing is owed.

    On one loop only. Over any stretch of time no more than ``rate`` times it, a quarter of a second's burst, and one piece of each
    stream that sends is let through, besides what is spent without waiting.
    """

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        if rate <= 0:
            raise ValueError("a rate must be above 0 bytes in a second")
        self._rate, self._clock = rate, clock
        self._left, self._since = rate * BURST_S, clock()
        self._lock: asyncio.Lock | None = None
        self.piece = max(int(rate * PIECE_S), 1)
        """Bytes that are sent at once."""

    def spend(self, nbytes: int) -> None:
        """Bytes that are sent now."""
        self._refill()
        self._left -= nbytes

    async def wait(self) -> None:
        """Until nothing is owed. Who waits longer goes first."""
        if self._lock is None:
            self._lock = asyncio.Lock()
        async with self._lock:
            while (owed := self.owed()) > 0:
                await asyncio.sleep(max(owed / self._rate, 0.001))

    def owed(self) -> float:
        """Bytes by which the budget is overdrawn; 0 or less if it is not."""
        self._refill()
        return -self._left

    def _refill(self) -> None:
        now = self._clock()
        self._left = min(self._left + (now - self._since) * self._rate, self._rate * BURST_S)
        self._since = now
