"""The upload budget that all streams and gossip of a node share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

CHUNK_S = 0.1  # of the budget that are sent at once: small messages wait no longer
BURST_S = 0.25  # of it that may be saved up
SHORTEST_WAIT_S = 0.001  # of one sleep, so that rounding cannot make it spin


class BandwidthLimiter:
    """A token bucket of ``rate`` bytes a second (above 0).

    Urgent sends may overdraw it; other sends wait until it is positive. On one loop only.

    Over any time t it lets through no more than ``rate`` * t bytes, a quarter of a second's burst,
    and one chunk of each stream that sends, besides urgent sends.
    """

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        if rate <= 0:
            raise ValueError("a rate must be above 0 bytes in a second")
        self._rate = rate
        self._clock = clock
        self._left = rate * BURST_S
        self._refilled_at = clock()
        self._lock = asyncio.Lock()
        self.chunk = max(int(rate * CHUNK_S), 1)
        """Bytes that are sent at once."""

    def spend(self, nbytes: int) -> None:
        self._refill()
        self._left -= nbytes

    async def wait(self) -> None:
        """Wait until the budget is not overdrawn. Callers go on in the order in which they came."""
        async with self._lock:
            while (deficit := self.deficit()) > 0:
                await asyncio.sleep(max(deficit / self._rate, SHORTEST_WAIT_S))

    def deficit(self) -> float:
        """Return the bytes by which the budget is overdrawn; 0 or less if it is not."""
        self._refill()
        return -self._left

    def _refill(self) -> None:
        now = self._clock()
        earned = (now - self._refilled_at) * self._rate
        self._left = min(self._left + earned, self._rate * BURST_S)
        self._refilled_at = now
