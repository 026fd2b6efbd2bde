"""One direction of a slow link, as arithmetic: when bytes that are handed in now come out at the
other end.
"""

from __future__ import annotations

import math


class Line:
    """Bytes leave one after another at ``rate`` bytes a second (inf: at once) and arrive ``delay``
    seconds after they left.

    Knows no clock: the caller says what time it is, in seconds, and never goes back. ValueError
    unless the rate is positive and the delay is not negative.
    """

    def __init__(self, rate: float = math.inf, delay: float = 0.0) -> None:
        if not rate > 0 or not 0 <= delay < math.inf:
            raise ValueError(
                f"a line needs a positive rate and a delay of at least 0, got {rate} bytes/s and "
                f"{delay} s"
            )
        self.rate, self.delay = rate, delay
        self._free = -math.inf
        self.bytes = 0
        """All that was handed in."""

    def backlog(self, now: float) -> float:
        """Seconds until the last byte handed in so far has left."""
        return max(self._free - now, 0.0)

    def send(self, now: float, size: int) -> float:
        """Hand in ``size`` bytes at the time ``now``; the time at which the last of them
        arrives.
        """
        self._free = max(now, self._free) + size / self.rate
        self.bytes += size
        return self._free + self.delay
