"""The pace of bulk to one peer, by the delay that it causes to pings.

Bulk and small messages share a connection, and a slow uplink holds seconds of bytes. So pings go
between pieces of bulk, and no more than a window of bytes is sent beyond the last one that was
answered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from shoal.swarm.pacing.link import LinkEstimate
from shoal.swarm.pacing.pings import Echo, Ping, Pings
from shoal.swarm.pacing.window import (
    FIRST_WINDOW_BYTES,
    MIN_QUEUE_S,
    UNPACED_BYTES,
    CongestionWindow,
)

MIN_PING_GAP_BYTES = 8 << 10
"""Between two pings."""
MAX_PINGS_PER_WINDOW = 16
# Without an answer for the first, and so many empty links' delays, but no longer than the second,
# the peer may be gone, and the window begins anew.
PONG_TIMEOUT_S = 2.0
PONG_TIMEOUT_DELAYS = 6
MAX_PONG_TIMEOUT_S = 4.5
SPREAD_FACTOR = 1.25
"""Times a window in a round trip that bytes go out at, at most: answers that waited behind the
peer's bulk come in lumps, and bytes that went out in lumps would make a queue here.
"""
MAX_SPREAD_S = 1.0
"""To wait for the next piece."""


class Pace:
    """How many bytes of bulk may be sent to one peer now. On one loop only.

    ``sharers`` returns the number of peers to which bulk goes, which share the uplink.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sharers: Callable[[], int] = lambda: 1
    ) -> None:
        self.link = LinkEstimate()
        self.window = CongestionWindow(self.link, sharers)
        self._clock = clock
        self._pings = Pings(clock)
        self._sent = 0  # bytes of bulk in all
        self._answered = 0  # bytes that went out before a ping that was answered
        self._next_at = 0.0  # when more may go out
        self._quickest = float("inf")  # ping of the transfers that are under way
        self._holding = False  # until the empty link was measured
        self._ending = False
        self._moved = asyncio.Event()
        self._turns = asyncio.Lock()

    async def room(self, most: int) -> int:
        """Wait until bytes may be sent; return how many, at most ``most``, and count them as sent.

        Those before were written. Transfers to the same peer get room in turn.
        """
        async with self._turns:
            window = self.window.nbytes
            piece = max(window / MAX_PINGS_PER_WINDOW, min(window / 2, MIN_PING_GAP_BYTES))
            if self._sent - self._pings.last_ahead >= piece and not self._holding:
                self._pings.send(self._sent)
            while self._holding or self._sent - self._answered >= self.window.nbytes:
                self.window.was_filled = True
                if not self._pings and not self._holding:
                    self._pings.send(self._sent)
                self._moved.clear()
                await self._moved.wait()
            wait = min(self._next_at - self._clock(), MAX_SPREAD_S)
            if wait > 0:
                await asyncio.sleep(wait)
            size = min(most, int(piece))
            if not self.window.starting and self.window.is_paced:
                spread_s = size * self.link.trip_s / (SPREAD_FACTOR * self.window.nbytes)
                self._next_at = max(self._next_at, self._clock()) + spread_s
            self._sent += size
            return size

    async def measure(self, echo: Echo) -> None:
        """Send pings by ``echo`` and take in the answers until the transfers have ended.

        Raises OSError or EOFError.
        """
        self._pings.begin(echo)
        if not self.window.is_paced:
            self.window.restart(float(FIRST_WINDOW_BYTES))
            self._holding = True
        self._pings.send(self._sent)  # also because bulk may wait for room already
        last_was_sent = False
        # `wait_for` loses a cancellation that comes together with an answer (Python below 3.12), so
        # another measurement ends this one by taking its echo's place.
        while self._pings.echo is echo:
            if not self._pings:
                if not self._ending:
                    await self._pings.wait()
                    continue
                if last_was_sent and self.link.is_fresh(self._clock()):
                    return
                # At the end nothing of this node's is before it, and perhaps nothing of the peer's.
                last_was_sent = True
                self._pings.send(self._sent)
                continue
            data = await self._pings.answer(echo, self._patience_s())
            if self._pings.echo is not echo or (not data and self._ending):
                return
            # Nothing goes out before an answer: bytes to a peer that is gone would look as if it
            # took them.
            if not data:
                self.window.restart(self.window.floor())
                continue
            self._answer(self._pings.answered(data))

    def begin(self) -> None:
        """Start a transfer while there is none: bulk waits until the empty link was measured, if it
        never was.
        """
        self._ending = False
        self._quickest = float("inf")
        self.window.begin_transfer(self._answered, self._clock())
        self._hold(self.window.is_paced and not self.link.measured)

    def end(self) -> None:
        """Note that the last transfer has ended: the delay of the empty link is measured if that
        was long ago, and no more.
        """
        self._ending = True
        self._pings.wake()

    def stop(self) -> None:
        """End measuring: what was sent will have arrived before there is more to send."""
        self._pings.echo = None
        self._answered = self._sent
        self._hold(False)

    def forget(self) -> None:
        """Learn the link anew: the peer, or this machine, may be in another network now."""
        self.link.forget_delay()
        self.link.forget_rate()
        self.window.starting = True
        self.window.young = True

    def free(self) -> None:
        """Pace no more: the peer cannot be pinged, or is on this machine."""
        self.window.nbytes = UNPACED_BYTES
        self.stop()

    def _hold(self, holding: bool) -> None:
        self._holding = holding
        self._moved.set()

    def _patience_s(self) -> float:
        """Return how long to wait for an answer."""
        patience_s = PONG_TIMEOUT_S + PONG_TIMEOUT_DELAYS * self.link.empty_delay()
        return min(patience_s, MAX_PONG_TIMEOUT_S)

    def _answer(self, ping: Ping) -> None:
        now = self._clock()
        delay = now - ping.began
        self._answered = max(self._answered, ping.ahead)
        self.link.note_arrival(self._answered, now)
        self._quickest = min(self._quickest, delay)
        is_last = self._ending and not self._pings
        if is_last and self.link.is_other_link(self._quickest, delay, MIN_QUEUE_S):
            self.link.forget_delay()
        # Not in the midst of a transfer, where the peer's own bulk delays the answers.
        if self._holding or not self.link.measured or (is_last and not self.link.is_fresh(now)):
            self.link.begin_empty(delay, now)
            self._hold(False)
        self.link.note_delay(delay)
        self.window.note_answer(ping.ahead, delay, self._answered, self._sent, now)
        self._moved.set()
