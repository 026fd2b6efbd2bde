"""What the link to one peer was measured to do: how long a ping takes, and how much arrives."""

from __future__ import annotations

from collections import deque

# How long the delay of the empty link counts; it is measured at the end of a transfer.
EMPTY_DELAY_VALID_S = 60.0
EMPTY_DELAYS_KEPT = 8  # measurements, of which the shortest counts
# A transfer whose every ping took more than so many times the empty link's delay, and the shortest
# queue's, went over another link.
OTHER_LINK_FACTOR = 2
RATES_KEPT = 24  # recent rates at which bytes arrived, of which the largest counts
RATE_SAMPLE_S = 0.25  # over which one rate is measured
RATE_GAP_S = 3 * RATE_SAMPLE_S  # a longer sample includes a pause, and says nothing of the link
TRIP_WINDOW = 16  # round trips of which the average is taken
# The same where they become quicker: another transfer ended, and what it left is used at once.
QUICKER_TRIP_WINDOW = 4


class LinkEstimate:
    """Delay of the empty link, average round trip, and highest rate of recent bulk."""

    def __init__(self) -> None:
        self.trip_s = 0.0
        """Seconds that pings took recently, on average; 0 before the first."""
        self._empty_delays: deque[float] = deque(maxlen=EMPTY_DELAYS_KEPT)
        self._emptied_at = float("-inf")
        self._rates: deque[float] = deque(maxlen=RATES_KEPT)
        self._sample_began = 0.0
        self._sample_answered = 0

    @property
    def measured(self) -> bool:
        """Whether the delay of the empty link is known."""
        return bool(self._empty_delays)

    @property
    def rated(self) -> bool:
        """Whether any rate is known."""
        return bool(self._rates)

    def empty_delay(self, default: float = 0.0) -> float:
        """Return the seconds that a ping takes on the empty link; ``default`` if not measured."""
        return min(self._empty_delays, default=default)

    def rate(self) -> float:
        """Return the bytes a second that the link carried recently, at most; 0 if not measured."""
        return max(self._rates, default=0.0)

    def is_fresh(self, now: float) -> bool:
        """Return whether the delay of the empty link was measured lately."""
        return now - self._emptied_at <= EMPTY_DELAY_VALID_S

    def begin_empty(self, delay: float, now: float) -> None:
        """Take the delay of a ping on a link that nothing else was sent on."""
        self._empty_delays.append(delay)
        self._emptied_at = now

    def note_delay(self, delay: float) -> None:
        """Take the delay of any ping: the newest measurement is at most that."""
        self._empty_delays[-1] = min(self._empty_delays[-1], delay)
        if not self.trip_s:
            self.trip_s = delay
            return
        window = TRIP_WINDOW if delay > self.trip_s else QUICKER_TRIP_WINDOW
        self.trip_s += (delay - self.trip_s) / window

    def note_arrival(self, answered: int, now: float) -> None:
        """Take the number of bytes that are known to have arrived in all."""
        seconds = now - self._sample_began
        if seconds < RATE_SAMPLE_S:
            return
        if seconds < RATE_GAP_S and answered > self._sample_answered:
            self._rates.append((answered - self._sample_answered) / seconds)
        self._sample_began = now
        self._sample_answered = answered

    def is_other_link(self, quickest: float, delay: float, queue_s: float) -> bool:
        """Return whether pings so slow, from first to last, went over another link.

        ``quickest``: of a transfer; ``delay``: of its last, in place of one not measured.
        """
        return quickest > OTHER_LINK_FACTOR * self.empty_delay(delay) + queue_s

    def forget_delay(self) -> None:
        self._empty_delays.clear()

    def forget_rate(self) -> None:
        self._rates.clear()
