"""Pacing of bulk to each peer: as fast as the link takes it, and so that small messages hardly wait behind it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import NamedTuple

# Pacing: bulk may delay small messages by a quarter of the empty link's delay, within `DELAY_S`, and by the time that `SURPLUS`
# bytes take.
DELAY_S = (0.05, 0.1)
SURPLUS = 12 << 10  # over all peers to which bulk goes
FIRST, LEAST, MOST = 32 << 10, 16 << 10, 256 << 20  # bytes on their way: at first, at least, at most
LEAST_RATE = 125e3  # bytes a second that a long link carries at least: with fewer bytes on their way each lost packet stops it
CHANGED = 2  # times the empty link's delay, and the least of `DELAY_S`: it is another link
GRAIN = 8 << 10  # bytes between two pings, at least
PING = 32  # bytes of a ping, which the peer's daemon sends back
PINGS, FEWER = 16, 4  # in a window of bytes, at most; and of which the delay is the mean once they are quicker
PONG_S, PONGS = (2.0, 4.5), 6  # seconds, and empty links' delays within them, without an answer after which only a few bytes go out
EMPTY_S = 60.0  # seconds for which the delay of the empty link is known, which is measured after a transfer
BASES = 8  # such measurements of which the shortest counts
SPREAD, SPREAD_S = 1.25, 1.0  # times a window in a round trip, at which bytes go out at most, and seconds to wait at most
LINES, LINE_S = 24, 0.25  # rates at which bytes arrived recently, of which the largest counts, and seconds for one
FALLEN = 0.25  # times the largest of these: one that carries less has become slow
FLOODED_S = 0.4  # seconds of a queue that is not let drain by degrees
GROWN = 1.25  # times the rate before: TCP, which begins slowly after a pause, is not at the link's rate yet
PACED = 256  # peers whose pace is remembered
UNPACED = float(1 << 62)  # bytes: a window that holds nothing back

log = logging.getLogger(__name__)


class Echo(NamedTuple):
    """The ends of a stream to a peer that sends back what it gets, `PING` bytes at a time."""

    write: Callable[[bytes], None]
    read: Callable[[], Awaitable[bytes]]
    """Returns the next answer; one that is cancelled loses nothing. Raises OSError or EOFError at the end."""


@dataclass
class _Ping:
    data: bytes
    began: float
    ahead: int
    """Bytes of bulk that were sent before it."""


class Pace:
    """The bytes of bulk that may be on their way to one peer, by the delay that they cause. On one loop only.

    Bulk and small messages share a connection, and a slow uplink holds seconds of bytes. So pings travel between pieces of bulk,
    and no more than ``window`` bytes are sent beyond the last one that was answered. The window follows FAST TCP (Wei, Jin, Low and
    Hegde, 2006), once in a round trip: window = window * least / delay + surplus, whose fixed point keeps ``surplus`` bytes in
    queues. That is what leaves in `DELAY_S`, so that a fast link is filled, and `SURPLUS`, so that two that share a link come to
    the same rate. It begins by doubling as long as there is no queue and more arrives. At the start of a transfer it does not
    shrink as long as more bytes arrive with each round trip: then the queue is that of a TCP that begins slowly, not of the link.
    And it does not shrink below what the link carried recently in the empty link's delay and the longest of `DELAY_S`: a longer
    queue than that is the peer's, who sends bulk as well, and pings wait in both.

    ``shared``: returns the number of peers to which bulk goes, which share the uplink.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, shared: Callable[[], int] = lambda: 1) -> None:
        self.window = float(FIRST)
        self.users = 0
        self.task: asyncio.Future[None] | None = None
        self._clock, self._shared = clock, shared
        self._echo: Echo | None = None
        self._sent = self._answered = self._pinged = self._turn = 0  # bytes: in all, before pings, at the last change of the window
        self._turned, self._before, self._rate = 0.0, 0, 0.0  # the time of that change, bytes answered then, bytes a second before
        self._pings: deque[_Ping] = deque()
        self._delay = float("inf")  # the shortest since the last change: the others may have waited for a processor
        self._quickest = float("inf")  # the shortest of the transfers that are under way
        self._bases: deque[float] = deque(maxlen=BASES)  # seconds that the quickest ping took, of each of the last minutes of bulk
        self._measured = float("-inf")  # the time at which the last of these began
        self._lines: deque[float] = deque(maxlen=LINES)  # bytes a second that arrived
        self._mark, self._next = (0.0, 0), 0.0  # when the last of them began, with the bytes answered then; when more may go out
        self._trip = 0.0  # seconds that pings took recently, on average
        self._holding, self._starting, self._young, self._full, self._ending = False, True, True, False, False
        self._moved, self._flying, self._turns = asyncio.Event(), asyncio.Event(), asyncio.Lock()

    async def room(self, most: int) -> int:
        """Wait until bytes may be sent; return how many, at most ``most``, and count them as sent. Those before were written.
        Transfers to the same peer get room in turn.
        """
        async with self._turns:
            return await self._room(most)

    async def _room(self, most: int) -> int:
        grain = max(self.window / PINGS, min(self.window / 2, GRAIN))
        if self._sent - self._pinged >= grain and not self._holding:
            self._ping()
        while self._holding or self._sent - self._answered >= self.window:
            self._full = True
            if not self._pings and not self._holding:
                self._ping()
            self._moved.clear()
            await self._moved.wait()
        if (wait := min(self._next - self._clock(), SPREAD_S)) > 0:
            await asyncio.sleep(wait)
        size = min(most, int(grain))
        if not self._starting and self.window <= MOST:
            # Answers that waited behind the peer's bulk come in lumps; bytes that went out in lumps would make a queue here.
            self._next = max(self._next, self._clock()) + size * self._trip / (SPREAD * self.window)
        self._sent += size
        return size

    async def measure(self, echo: Echo) -> None:
        """Send pings by ``echo`` and take in the answers until the transfers have ended. Raises OSError or EOFError."""
        self._echo, last = echo, False
        self._pings.clear()
        if self.window > MOST:
            self.window, self._starting, self._young, self._holding = float(FIRST), True, True, True
        self._ping()  # also because bulk may wait for room already
        while self._echo is echo:  # ``wait_for`` loses a cancellation that comes together with an answer (Python below 3.12)
            if not self._pings:
                if self._ending:
                    if last and self._fresh():
                        return
                    last = True  # at the end nothing of this node's is before it, and perhaps nothing of the peer's
                    self._ping()
                else:
                    self._flying.clear()
                    await self._flying.wait()
                continue
            data = b""
            with contextlib.suppress(asyncio.TimeoutError):
                patience = min(PONG_S[0] + PONGS * min(self._bases, default=0.0), PONG_S[1])  # a silent stream is given up soon
                data = await asyncio.wait_for(echo.read(), patience)
            if self._echo is not echo or (not data and self._ending):
                return
            if not data:  # a few bytes go out all the same, because the peer may only be busy
                self.window, self._answered, self._starting, self._young = self._least(), self._sent, True, True
                self._hold(False)
                continue
            ping = self._pings.popleft()
            if data != ping.data:
                raise EOFError("the peer answers pings wrongly")
            self._answer(ping, self._clock() - ping.began)

    def begin(self) -> None:
        """Start a transfer while there is none: bulk waits until the empty link was measured, if it never was."""
        self._ending, self._starting, self._full = False, True, False
        self._turned, self._before, self._rate, self._quickest = self._clock(), self._answered, 0.0, float("inf")
        self._hold(self.window <= MOST and not self._bases)

    def end(self) -> None:
        """Note that the last transfer has ended: the delay of the empty link is measured if that was long ago, and no more."""
        self._ending = True
        self._flying.set()

    def stop(self) -> None:
        """End measuring: what was sent will have arrived before there is more to send."""
        self._echo, self._answered = None, self._sent
        self._hold(False)

    def forget(self) -> None:
        """Learn the link anew: the peer, or this machine, may be in another network now."""
        self._bases.clear()
        self._lines.clear()
        self._starting = self._young = True

    def free(self) -> None:
        """Pace no more: the peer cannot be pinged, or is on this machine."""
        self.window = UNPACED
        self.stop()

    def _fresh(self) -> bool:
        return self._clock() - self._measured <= EMPTY_S

    def _least(self) -> float:
        return max(LEAST, LEAST_RATE * (min(self._bases, default=0.0) + DELAY_S[1])) / self._shared()

    def _hold(self, holding: bool) -> None:
        self._holding = holding
        self._moved.set()

    def _ping(self) -> None:
        if self._echo is None:
            return
        ping = _Ping(os.urandom(PING), self._clock(), self._sent)
        self._pings.append(ping)
        self._pinged = self._sent
        self._echo.write(ping.data)
        self._flying.set()

    def _answer(self, ping: _Ping, delay: float) -> None:
        self._answered = max(self._answered, ping.ahead)
        (began, before), now = self._mark, self._clock()
        if now - began >= LINE_S:
            if now - began < 3 * LINE_S and self._answered > before:
                self._lines.append((self._answered - before) / (now - began))
            self._mark = now, self._answered
        self._quickest = min(self._quickest, delay)
        if self._ending and not self._pings and self._quickest > CHANGED * min(self._bases, default=delay) + DELAY_S[0]:
            self._bases.clear()  # so slow from the first ping to the last: the peer, or this machine, is in another network now
        # Not in the midst of a transfer, where the peer's own bulk delays the answers.
        if self._holding or not self._bases or (self._ending and not self._pings and not self._fresh()):
            self._bases.append(delay)
            self._measured = self._clock()
            self._hold(False)
        self._bases[-1] = min(self._bases[-1], delay)
        self._delay = min(self._delay, delay)
        # Quicker ones count more: another transfer has ended, and what it leaves free is used at once.
        self._trip += (delay - self._trip) / (PINGS if delay > self._trip else FEWER) if self._trip else delay
        if ping.ahead > self._turn:  # the last change has shown its effect
            self._adapt(self._delay, min(self._bases))
            self._turn, self._turned, self._before = self._sent, self._clock(), self._answered
            self._delay = float("inf")
        self._moved.set()

    def _adapt(self, delay: float, least: float) -> None:
        """Change the window by the ``delay`` of the last pings, and that of the empty link."""
        window, queue, delay = self.window, delay - least, max(delay, 1e-6)
        rate = (self._answered - self._before) / max(self._clock() - self._turned, 1e-6)
        allowed = min(max(least / 4, DELAY_S[0]), DELAY_S[1])
        grows = rate > GROWN * self._rate
        self._starting, self._rate = self._starting and (grows or (self._young and queue < DELAY_S[0])), rate
        self._young = self._young and self._starting and (grows or not self._lines)
        surplus = SURPLUS / self._shared() + window / delay * allowed
        aim = (window + window * least / delay + surplus) / 2
        if self._starting:
            aim = 2 * window if self._young and queue < DELAY_S[0] else window
        elif queue < allowed:
            aim = max(aim, (GROWN if queue < DELAY_S[0] else 1.125) * window)
        if self._full and delay > 2 * (least + DELAY_S[1]) and rate < FALLEN * max(self._lines, default=0.0):
            self._lines.clear()  # the link has become slow
        # So many bytes make no long queue here, whatever the delay. With fewer, of two that send to each other the one with more
        # bytes on their way would starve the other, whose pings wait behind those.
        carried = max(self._lines, default=0.0) * (least + DELAY_S[1])
        flooded = carried > 0 and queue > FLOODED_S
        if aim < window or self._full:  # one that was not filled says nothing of a larger one
            floor, lowest = max(min(carried, window), self._least()), window / 2
            if flooded:
                aim, lowest = min(aim, floor), floor
            self.window = min(max(aim, lowest, floor), 2 * window, float(MOST))
        self._full = False


class Pacer:
    """The paces of the peers to which one host sends bulk. ``echo`` pings a peer; it yields None for one that is not paced."""

    def __init__(
        self, echo: Callable[[str], AbstractAsyncContextManager[Echo | None]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._echo, self._clock = echo, clock
        self._paces: OrderedDict[str, Pace] = OrderedDict()
        self._busy = 0  # paces in use

    @contextlib.contextmanager
    def to(self, peer: str) -> Iterator[Pace]:
        """Yield the pace of bulk to ``peer``, which is measured until the end of the block. On the loop."""
        pace = self._paces.get(peer)
        if pace is None:
            pace = self._paces[peer] = Pace(self._clock, lambda: max(self._busy, 1))
        self._paces.move_to_end(peer)
        pace.users += 1
        if pace.users == 1:
            self._busy += 1
            pace.begin()
        if pace.task is None:
            pace.task = asyncio.ensure_future(self._measure(peer, pace))
        try:
            yield pace
        finally:
            pace.users -= 1
            if not pace.users:
                self._busy -= 1
                pace.end()
                idle = [name for name, known in self._paces.items() if not known.users]
                for name in idle[: max(len(self._paces) - PACED, 0)]:
                    del self._paces[name]

    def forget(self, peer: str) -> None:
        """Learn the link to ``peer`` anew."""
        if (pace := self._paces.get(peer)) is not None:
            pace.forget()

    async def _measure(self, peer: str, pace: Pace) -> None:
        try:
            while True:
                async with self._echo(peer) as echo:
                    if echo is None:
                        break
                    await pace.measure(echo)
                if not pace.users:  # another transfer may have begun while the pings of the last one ended
                    pace.stop()
                    return
        except Exception as error:  # bulk that waits for its pace must go on
            log.debug("bulk to a peer is not paced: %r", error)
        finally:
            pace.task = None
        pace.free()
