"""How long a transfer may take: what it is given, and beyond that as long as it moves quickly enough to be over within a bound.

A deadline must hold before anything is known of a link, so it supposes a rate, and a slower link would never complete a large
transfer. What the transfer itself moved recently, in each direction, measures this node's link and the other's, and no peer can lie
about it. A peer that sends a trickle is dropped at the deadline all the same: at its rate the transfer would not be over in time.
"""

from __future__ import annotations

from collections import deque

SLOWEST = 8e3  # bytes a second: the slowest link that counts
SLOW_S = 1800.0  # seconds that a transfer may take beyond what it is given
LATE_S, STEP_S = 30.0, 1.0  # seconds: what counts as late, and how often it is looked at


def slow_s(nbytes: int) -> float:
    """Return the seconds that moving ``nbytes`` bytes may take as long as they move: at `SLOWEST`, `SLOW_S` at most."""
    return min(nbytes / SLOWEST, SLOW_S)


class Progress:
    """What a transfer has moved recently. ``deadline``: until when it may take in any case; ``longest``: if it moves. Instants."""

    def __init__(self, deadline: float, longest: float) -> None:
        self.longest = max(deadline, longest)
        """The instant at which it is given up however fast it is."""
        self._deadline = deadline
        self._marks: deque[tuple[float, tuple[int, int]]] = deque()  # instants, and the bytes that were left then each way

    def overdue(self, now: float, left: tuple[int, int]) -> bool:
        """Return whether the transfer is to be given up ``now``, with so many bytes ``left`` to receive and to send."""
        if not self._marks or now - self._marks[-1][0] >= STEP_S:
            self._marks.append((now, left))
        while len(self._marks) > 2 and self._marks[1][0] <= now - LATE_S:
            self._marks.popleft()
        if now < self._deadline:
            return False
        since, before = self._marks[0]
        spent, rest = now - since, self.longest - now
        return rest <= 0 or any(after and (first - after) * rest < after * spent for first, after in zip(before, left, strict=True))

    def next(self, now: float) -> float:
        """Return the seconds until it may become overdue, so that this is noticed when it does."""
        return max((self._deadline if now < self._deadline else self.longest) - now, 0.0)
