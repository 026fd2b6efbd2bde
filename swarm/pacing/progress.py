"""When a transfer is given up.

A deadline must hold before anything is known of a link, so it supposes a rate, and a slower link
would never complete a large transfer. So a transfer goes on beyond its deadline as long as it moves
quickly enough to be over within a bound. What it moved itself, in each direction, measures this
node's link and the other's, and no peer can lie about it: one that sends a trickle is dropped at
the deadline all the same.
"""

from __future__ import annotations

from collections import deque

SLOWEST_BYTES_PER_S = 8e3  # the slowest link that counts
MAX_EXTENSION_S = 1800.0  # that a transfer may take beyond its deadline, however large it is
WINDOW_S = 30.0  # what "recently" means: the rate is that of so many seconds
SAMPLE_S = 1.0  # between two samples of what is left


def extension_s(nbytes: int) -> float:
    """Return the seconds that ``nbytes`` may take as long as they move, on the slowest link."""
    return min(nbytes / SLOWEST_BYTES_PER_S, MAX_EXTENSION_S)


class Progress:
    """What a transfer has moved recently.

    ``deadline``: until when it may take in any case; ``longest``: if it moves. Instants.
    """

    def __init__(self, deadline: float, longest: float) -> None:
        self.longest = max(deadline, longest)
        """The instant at which it is given up however fast it is."""
        self._deadline = deadline
        # Instants, each with the bytes that were left then to receive and to send.
        self._samples: deque[tuple[float, tuple[int, int]]] = deque()

    def overdue(self, now: float, left: tuple[int, int]) -> bool:
        """Return whether the transfer is to be given up ``now``, with so many bytes ``left`` to
        receive and to send.
        """
        self._sample(now, left)
        if now < self._deadline:
            return False
        remaining_s = self.longest - now
        if remaining_s <= 0:
            return True
        since, left_then = self._samples[0]
        elapsed_s = now - since
        for before, after in zip(left_then, left, strict=True):
            moved = before - after
            if after and moved * remaining_s < after * elapsed_s:
                return True  # at this rate it would not be over in time
        return False

    def next(self, now: float) -> float:
        """Return the seconds until it may become overdue, so that this is noticed when it does."""
        until = self._deadline if now < self._deadline else self.longest
        return max(until - now, 0.0)

    def _sample(self, now: float, left: tuple[int, int]) -> None:
        if not self._samples or now - self._samples[-1][0] >= SAMPLE_S:
            self._samples.append((now, left))
        while len(self._samples) > 2 and self._samples[1][0] <= now - WINDOW_S:
            self._samples.popleft()
