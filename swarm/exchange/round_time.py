"""How long a node's rounds take, and how long each waits for others: ``RoundTime``.

A round waits for others as long as is set, or in long rounds a fifth of the shorter of the last
two. A round is here the time from one sending of a fragment to its next, whatever else is sent
meanwhile. Why: docs/internals.md, "A slow partner".
"""

from __future__ import annotations

from shoal.swarm.exchange.timeouts import ExchangeTimeouts

SHARE = 0.2  # of the time from one round to the next that a node waits for others
LONGEST_S = 300.0  # seconds of that at most
OVERLAPPED_S = 3600.0  # seconds at most that a node waits for others while that costs no training
LEAST_S = 1.0  # seconds that every exchange may hold training
FIRST_S = 2.0  # seconds that an exchange may hold training before there is a measure
FIRST_RATE = 62.5e3  # bytes a second each way of an exchange before there is a measure


class RoundTime:
    """The time of one node's rounds. ``fragments``: sent in turn."""

    def __init__(self, timeouts: ExchangeTimeouts, fragments: int) -> None:
        self.timeouts, self._fragments = timeouts, fragments
        self._began: dict[int, float] = {}
        self._periods: dict[int, tuple[float, float]] = {}

    def begin(self, now: float, fragment: int = 0) -> float:
        """Note that a round of ``fragment`` begins; return the seconds since its last one began,
        infinite for the first.
        """
        period = now - self._began.get(fragment, float("-inf"))
        self._began[fragment] = now
        if period < float("inf"):
            self._periods[fragment] = (self._periods.get(fragment, (0.0, 0.0))[1], period)
        return period

    def period(self, fragment: int = 0) -> float:
        """Return the seconds of a round of ``fragment``; 0 while they are not known."""
        return min(self._periods.get(fragment, (0.0, 0.0)))

    def patience(self, fragment: int = 0) -> float:
        """Return the seconds to wait for others in a round of ``fragment``."""
        return max(self.timeouts.wait, min(self.period(fragment) * SHARE, LONGEST_S))

    def limit(self, nbytes: int, fragment: int) -> float:
        """Return how long a round may take: to form the pair or group, the transfer of ``nbytes``
        bytes each way, its commit.
        """
        return self.patience(fragment) + self.timeouts.longest(nbytes) + 8 * self.timeouts.chunk

    def _round_s(self, fragment: int) -> float:
        """Return the seconds of a round; 0 while they are not known."""
        return self.period(fragment) / self._fragments
