"""The pace of bulk to one peer, by the delay that it causes to pings.

Bulk and small messages share a connection, and a slow uplink holds seconds of bytes. So pings go
between pieces of bulk, and no more than a window of bytes is sent beyond the last one that was
answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

from shoal.swarm.pacing.link import LinkEstimate
from shoal.swarm.pacing.window import (
    FIRST_WINDOW_BYTES,
    MIN_QUEUE_S,
    UNPACED_BYTES,
    CongestionWindow,
)

PING_BYTES = 32  # which the peer's daemon sends back
PING_GAP_BYTES = 8 << 10  # between two pings, at least
PINGS_PER_WINDOW = 16  # at most
# Without an answer for the first, and so many empty links' delays, but no longer than the second,
# the peer may be gone, and the window begins anew.
PONG_TIMEOUT_S = 2.0
PONG_TIMEOUT_DELAYS = 6
MAX_PONG_TIMEOUT_S = 4.5
# Bytes go out at so many times a window in a round trip, at most: answers that waited behind the
# peer's bulk come in lumps, and bytes that went out in lumps would make a queue here.
SPREAD_FACTOR = 1.25
MAX_SPREAD_S = 1.0  # to wait for the next piece


class Echo(NamedTuple):
    """The ends of a stream to a peer that sends back what it gets, `PING_BYTES` at a time."""

    write: Callable[[bytes], None]
    read: Callable[[], Awaitable[bytes]]
    """Returns the next answer; one that is cancelled loses nothing.

    Raises OSError or EOFError at the end.
    """


@dataclass
class _Ping:
    data: bytes
    began: float
    ahead: int
    """Bytes of bulk that were sent before it."""


class Pace:
    """How many bytes of bulk may be sent to one peer now. On one loop only.

    ``sharers`` returns the number of peers to which bulk goes, which share the uplink.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sharers: Callable[[], int] = lambda: 1
    ) -> None:
        self.link = LinkEstimate()
        self.window = CongestionWindow(self.link, sharers)
        self.users = 0
        self.task: asyncio.Future[None] | None = None
        self._clock = clock
        self._echo: Echo | None = None
        self._pings: deque[_Ping] = deque()
        self._sent = 0  # bytes of bulk in all
        self._answered = 0  # bytes that went out before a ping that was answered
        self._pinged = 0  # bytes sent before the last ping
        self._next_at = 0.0  # when more may go out
        self._quickest = float("inf")  # ping of the transfers that are under way
        self._holding = False  # until the empty link was measured
        self._ending = False
        self._moved = asyncio.Event()
        self._flying = asyncio.Event()
        self._turns = asyncio.Lock()

    async def room(self, most: int) -> int:
        """Wait until bytes may be sent; return how many, at most ``most``, and count them as sent.

        Those before were written. Transfers to the same peer get room in turn.
        """
        async with self._turns:
            piece = max(
                self.window.nbytes / PINGS_PER_WINDOW, min(self.window.nbytes / 2, PING_GAP_BYTES)
            )
            if self._sent - self._pinged >= piece and not self._holding:
                self._ping()
            while self._holding or self._sent - self._answered >= self.window.nbytes:
                self.window.was_filled = True
                if not self._pings and not self._holding:
                    self._ping()
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
        self._echo = echo
        self._pings.clear()
        if not self.window.is_paced:
            self.window.restart(float(FIRST_WINDOW_BYTES))
            self._holding = True
        self._ping()  # also because bulk may wait for room already
        last_was_sent = False
        # `wait_for` loses a cancellation that comes together with an answer (Python below 3.12), so
        # another measurement ends this one by taking its echo's place.
        while self._echo is echo:
            if not self._pings:
                if not self._ending:
                    self._flying.clear()
                    await self._flying.wait()
                    continue
                if last_was_sent and self.link.is_fresh(self._clock()):
                    return
                # At the end nothing of this node's is before it, and perhaps nothing of the peer's.
                last_was_sent = True
                self._ping()
                continue
            data = await self._pong(echo)
            if self._echo is not echo or (not data and self._ending):
                return
            # Nothing goes out before an answer: bytes to a peer that is gone would look as if it
            # took them.
            if not data:
                self.window.restart(self.window.floor())
                continue
            ping = self._pings.popleft()
            if data != ping.data:
                raise EOFError("the peer answers pings wrongly")
            self._answer(ping)

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
        self._flying.set()

    def stop(self) -> None:
        """End measuring: what was sent will have arrived before there is more to send."""
        self._echo = None
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

    def _ping(self) -> None:
        if self._echo is None:
            return
        ping = _Ping(os.urandom(PING_BYTES), self._clock(), self._sent)
        self._pings.append(ping)
        self._pinged = self._sent
        self._echo.write(ping.data)
        self._flying.set()

    async def _pong(self, echo: Echo) -> bytes:
        """Return the next answer; nothing if none comes in time."""
        patience_s = PONG_TIMEOUT_S + PONG_TIMEOUT_DELAYS * self.link.empty_delay()
        with contextlib.suppress(asyncio.TimeoutError):
            return await asyncio.wait_for(echo.read(), min(patience_s, MAX_PONG_TIMEOUT_S))
        return b""

    def _answer(self, ping: _Ping) -> None:
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
