"""The congestion window of bulk to one peer: FAST TCP's rule with a floor.

    window = window * empty_delay / delay + surplus        once in a round trip

Its fixed point keeps ``surplus`` bytes in queues. Why these numbers, and when the window does not
shrink: docs/internals.md, "Pacing".
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.swarm.pacing.link import LinkEstimate

# Bulk may delay small messages by a quarter of the empty link's delay, within these bounds, so that
# a fast link is filled ...
MIN_QUEUE_S = 0.05
MAX_QUEUE_S = 0.1
# ... and by the time these take, so that two that share a link come to the same rate.
SURPLUS_BYTES = 12 << 10  # over all peers to which bulk goes
FIRST_WINDOW_BYTES = 32 << 10
MIN_WINDOW_BYTES = 16 << 10
MAX_WINDOW_BYTES = 256 << 20
UNPACED_BYTES = float(1 << 62)  # a window that holds nothing back
# That a long link carries at least: with fewer bytes on their way each lost packet stops it.
MIN_RATE_BYTES_PER_S = 125e3
# Beyond so many times the rate before, TCP, which begins slowly after a pause, is not at the link's
# rate yet.
RATE_GROWTH = 1.25
WINDOW_GROWTH = 1.25  # times the window, while there is hardly a queue
CAREFUL_GROWTH = 1.125  # the same while the queue is shorter than allowed
SLOW_START_GROWTH = 2  # the same on a link of which nothing is known
SLOW_LINK_SHARE = 0.25  # of the best recent rate: a link that carries less has become slow
FLOODED_QUEUE_S = 0.4  # a longer queue is not let drain by degrees
SHORTEST_S = 1e-6  # of a time that something is divided by


class CongestionWindow:
    """The bytes of bulk that may be on their way to one peer.

    ``sharers`` returns the number of peers to which bulk goes, which share the uplink.
    """

    def __init__(self, link: LinkEstimate, sharers: Callable[[], int]) -> None:
        self.nbytes = float(FIRST_WINDOW_BYTES)
        self.starting = True
        """Whether more bytes arrived with each round trip of this transfer."""
        self.young = True
        """Whether, besides, nothing was known of the link."""
        self.was_filled = False
        """Whether bulk waited for room: a window that was not filled says nothing of a larger."""
        self._link = link
        self._sharers = sharers
        # At the last change:
        self._sent = 0
        self._changed_at = 0.0
        self._answered = 0
        self._rate = 0.0  # bytes a second in the round trip before
        # The shortest delay since: other pings may have waited for a processor.
        self._delay = float("inf")

    @property
    def is_paced(self) -> bool:
        return self.nbytes <= MAX_WINDOW_BYTES

    def begin_transfer(self, answered: int, now: float) -> None:
        """Begin to compare rates anew: there was a pause."""
        self.starting = True
        self.was_filled = False
        self._changed_at = now
        self._answered = answered
        self._rate = 0.0

    def restart(self, nbytes: float) -> None:
        """Begin with a window of ``nbytes`` on a link of which nothing is known."""
        self.nbytes = nbytes
        self.starting = True
        self.young = True

    def floor(self) -> float:
        """Return the bytes below which the window never falls on this link."""
        longest_trip = self._link.empty_delay() + MAX_QUEUE_S
        return max(MIN_WINDOW_BYTES, MIN_RATE_BYTES_PER_S * longest_trip) / self._sharers()

    def note_answer(self, ahead: int, delay: float, answered: int, sent: int, now: float) -> None:
        """Take a ping that took ``delay`` and went out after ``ahead`` bytes.

        Changes the window once the last change has shown its effect.
        """
        self._delay = min(self._delay, delay)
        if ahead <= self._sent:
            return
        rate = (answered - self._answered) / max(now - self._changed_at, SHORTEST_S)
        self._adapt(self._delay, rate)
        self._sent = sent
        self._changed_at = now
        self._answered = answered
        self._delay = float("inf")

    def _adapt(self, delay: float, rate: float) -> None:
        empty_delay = self._link.empty_delay()
        queue_s = delay - empty_delay
        allowed_s = min(max(empty_delay / 4, MIN_QUEUE_S), MAX_QUEUE_S)
        self._note_growth(rate, queue_s)
        if self.starting:
            aim = self._starting_aim(queue_s)
        else:
            aim = self._steady_aim(max(delay, SHORTEST_S), empty_delay, allowed_s)
        crowded = self.was_filled and delay > 2 * (empty_delay + MAX_QUEUE_S)
        if crowded and rate < SLOW_LINK_SHARE * self._link.rate():
            self._link.forget_rate()
        if aim < self.nbytes or self.was_filled:
            self._move(aim, queue_s, empty_delay)
        self.was_filled = False

    def _note_growth(self, rate: float, queue_s: float) -> None:
        """Note whether the transfer is still at its start."""
        grows = rate > RATE_GROWTH * self._rate
        self._rate = rate
        self.starting = self.starting and (grows or (self.young and queue_s < MIN_QUEUE_S))
        self.young = self.young and self.starting and (grows or not self._link.rated)

    def _steady_aim(self, delay: float, empty_delay: float, allowed_s: float) -> float:
        """Return the window by FAST TCP's rule, or a larger one while the queue is short."""
        surplus = SURPLUS_BYTES / self._sharers() + self.nbytes / delay * allowed_s
        aim = (self.nbytes + self.nbytes * empty_delay / delay + surplus) / 2
        queue_s = delay - empty_delay
        if queue_s < MIN_QUEUE_S:
            return max(aim, WINDOW_GROWTH * self.nbytes)
        if queue_s < allowed_s:
            return max(aim, CAREFUL_GROWTH * self.nbytes)
        return aim

    def _starting_aim(self, queue_s: float) -> float:
        """Return the window at the start of a transfer, where it does not shrink."""
        if queue_s >= MIN_QUEUE_S:
            return self.nbytes
        growth = SLOW_START_GROWTH if self.young else WINDOW_GROWTH
        return growth * self.nbytes

    def _move(self, aim: float, queue_s: float, empty_delay: float) -> None:
        """Change the window to ``aim``, within its bounds."""
        # What the link carried makes no long queue here, whatever the delay. With fewer bytes, of
        # two that send to each other the one with more on their way would starve the other, whose
        # pings wait behind those.
        carried = self._link.rate() * (empty_delay + MAX_QUEUE_S)
        floor = max(min(carried, self.nbytes), self.floor())
        lowest = self.nbytes / 2
        if carried > 0 and queue_s > FLOODED_QUEUE_S:
            aim = min(aim, floor)
            lowest = floor
        self.nbytes = min(max(aim, lowest, floor), 2 * self.nbytes, float(MAX_WINDOW_BYTES))
