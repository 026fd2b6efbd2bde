"""Pacing of bulk to each peer: as fast as the link takes it, and so that small messages hardly wait
behind it.

The upload budget that all streams and gossip of a node share.

How long a transfer may take: what it is given, and beyond that as long as it moves quickly enough
to be over within a bound.

A deadline must hold before anything is known of a link, so it supposes a rate, and a slower link
would never complete a large transfer. What the transfer itself moved recently, in each direction,
measures this node's link and the other's, and no peer can lie about it. A peer that sends a trickle
is dropped at the deadline all the same: at its rate the transfer would not be over in time.

Counts of what one host sends and receives, and what its link and its ways to others were measured
to carry.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

CHUNK_S = 0.1  # seconds of the upload budget that are sent at once
BURST_S = 0.25  # seconds of it that may be saved up


class BandwidthLimiter:
    """A budget of ``rate`` bytes a second (above 0).

    Urgent sends may overdraw it; other sends wait until it is positive.

    On one loop only. Over any time t it lets through no more than ``rate`` * t bytes, a quarter of
    a second's burst, and one chunk of each stream that sends, besides urgent sends.
    """

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        if rate <= 0:
            raise ValueError("a rate must be above 0 bytes in a second")
        self._rate, self._clock = rate, clock
        self._left, self._since = rate * BURST_S, clock()
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
                await asyncio.sleep(max(deficit / self._rate, 0.001))

    def deficit(self) -> float:
        """Return the bytes by which the budget is overdrawn; 0 or less if it is not."""
        self._refill()
        return -self._left

    def _refill(self) -> None:
        now = self._clock()
        self._left = min(self._left + (now - self._since) * self._rate, self._rate * BURST_S)
        self._since = now


SLOWEST = 8e3  # bytes a second: the slowest link that counts
SLOW_S = 1800.0  # seconds that a transfer may take beyond what it is given
LATE_S, STEP_S = 30.0, 1.0  # seconds: what counts as late, and how often it is looked at


def slow_s(nbytes: int) -> float:
    """Return the seconds that moving ``nbytes`` bytes may take as long as they move: at `SLOWEST`,
    `SLOW_S` at most.
    """
    return min(nbytes / SLOWEST, SLOW_S)


class Progress:
    """What a transfer has moved recently.

    ``deadline``: until when it may take in any case; ``longest``: if it moves. Instants.
    """

    def __init__(self, deadline: float, longest: float) -> None:
        self.longest = max(deadline, longest)
        """The instant at which it is given up however fast it is."""
        self._deadline = deadline
        self._marks: deque[tuple[float, tuple[int, int]]] = (
            deque()
        )  # instants, and the bytes that were left then each way

    def overdue(self, now: float, left: tuple[int, int]) -> bool:
        """Return whether the transfer is to be given up ``now``, with so many bytes ``left`` to
        receive and to send.
        """
        if not self._marks or now - self._marks[-1][0] >= STEP_S:
            self._marks.append((now, left))
        while len(self._marks) > 2 and self._marks[1][0] <= now - LATE_S:
            self._marks.popleft()
        if now < self._deadline:
            return False
        since, before = self._marks[0]
        spent, rest = now - since, self.longest - now
        return rest <= 0 or any(
            after and (first - after) * rest < after * spent
            for first, after in zip(before, left, strict=True)
        )

    def next(self, now: float) -> float:
        """Return the seconds until it may become overdue, so that this is noticed when it does."""
        return max((self._deadline if now < self._deadline else self.longest) - now, 0.0)


# Pacing: bulk may delay small messages by a quarter of the empty link's delay, within `DELAY_S`,
# and by the time that `SURPLUS` bytes take.
DELAY_S = (0.05, 0.1)
SURPLUS = 12 << 10  # over all peers to which bulk goes
FIRST, LEAST, MOST = (
    32 << 10,
    16 << 10,
    256 << 20,
)  # bytes on their way: at first, at least, at most
# bytes a second that a long link carries at least: with fewer bytes on their way each lost packet
# stops it
LEAST_RATE = 125e3
CHANGED = 2  # times the empty link's delay, and the least of `DELAY_S`: it is another link
GRAIN = 8 << 10  # bytes between two pings, at least
PING = 32  # bytes of a ping, which the peer's daemon sends back
PINGS, FEWER = (
    16,
    4,
)  # in a window of bytes, at most; and of which the delay is the mean once they are quicker
PONG_S, PONGS = (
    (2.0, 4.5),
    6,
)  # seconds, and empty links' delays within them, without an answer, after which it begins anew
# seconds for which the delay of the empty link is known, which is measured after a transfer
EMPTY_S = 60.0
BASES = 8  # such measurements of which the shortest counts
SPREAD, SPREAD_S = (
    1.25,
    1.0,
)  # times a window in a round trip, at which bytes go out at most, and seconds to wait at most
LINES, LINE_S = (
    24,
    0.25,
)  # rates at which bytes arrived recently, of which the largest counts, and seconds for one
FALLEN = 0.25  # times the largest of these: one that carries less has become slow
FLOODED_S = 0.4  # seconds of a queue that is not let drain by degrees
# times the rate before: TCP, which begins slowly after a pause, is not at the link's rate yet
GROWN = 1.25
PACED = 256  # peers whose pace is remembered
UNPACED = float(1 << 62)  # bytes: a window that holds nothing back

log = logging.getLogger(__name__)


class Echo(NamedTuple):
    """The ends of a stream to a peer that sends back what it gets, `PING` bytes at a time."""

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
    """The bytes of bulk that may be on their way to one peer, by the delay that they cause.

    On one loop only.

    Bulk and small messages share a connection, and a slow uplink holds seconds of bytes. So pings
    travel between pieces of bulk, and no more than ``window`` bytes are sent beyond the last one
    that was answered. The window follows FAST TCP (Wei, Jin, Low and Hegde, 2006), once in a round
    trip: window = window * least / delay + surplus, whose fixed point keeps ``surplus`` bytes in
    queues. That is what leaves in `DELAY_S`, so that a fast link is filled, and `SURPLUS`, so that
    two that share a link come to the same rate. It begins by doubling as long as there is no queue
    and more arrives. At the start of a transfer it does not shrink as long as more bytes arrive
    with each round trip: then the queue is that of a TCP that begins slowly, not of the link. And
    it does not shrink below what the link carried recently in the empty link's delay and the
    longest of `DELAY_S`: a longer queue than that is the peer's, who sends bulk as well, and pings
    wait in both.

    ``shared``: returns the number of peers to which bulk goes, which share the uplink.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, shared: Callable[[], int] = lambda: 1
    ) -> None:
        self.window = float(FIRST)
        self.users = 0
        self.task: asyncio.Future[None] | None = None
        self._clock, self._shared = clock, shared
        self._echo: Echo | None = None
        self._sent = self._answered = self._pinged = self._turn = (
            0  # bytes: in all, before pings, at the last change of the window
        )
        self._turned, self._before, self._rate = (
            0.0,
            0,
            0.0,
        )  # the time of that change, bytes answered then, bytes a second before
        self._pings: deque[_Ping] = deque()
        self._delay = float(
            "inf"
        )  # the shortest since the last change: the others may have waited for a processor
        self._quickest = float("inf")  # the shortest of the transfers that are under way
        self._bases: deque[float] = deque(
            maxlen=BASES
        )  # seconds that the quickest ping took, of each of the last minutes of bulk
        self._measured = float("-inf")  # the time at which the last of these began
        self._lines: deque[float] = deque(maxlen=LINES)  # bytes a second that arrived
        self._mark, self._next = (
            (0.0, 0),
            0.0,
        )  # when the last of them began, with the bytes answered then; when more may go out
        self._trip = 0.0  # seconds that pings took recently, on average
        self._holding, self._starting, self._young, self._full, self._ending = (
            False,
            True,
            True,
            False,
            False,
        )
        self._moved, self._flying, self._turns = asyncio.Event(), asyncio.Event(), asyncio.Lock()

    async def room(self, most: int) -> int:
        """Wait until bytes may be sent; return how many, at most ``most``, and count them as sent.

        Those before were written.
        Transfers to the same peer get room in turn.
        """
        async with self._turns:
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
                # Answers that waited behind the peer's bulk come in lumps; bytes that went out in
                # lumps would make a queue here.
                self._next = max(self._next, self._clock()) + size * self._trip / (
                    SPREAD * self.window
                )
            self._sent += size
            return size

    async def measure(self, echo: Echo) -> None:
        """Send pings by ``echo`` and take in the answers until the transfers have ended.

        Raises OSError or EOFError.
        """
        self._echo, last = echo, False
        self._pings.clear()
        if self.window > MOST:
            self.window, self._starting, self._young, self._holding = float(FIRST), True, True, True
        self._ping()  # also because bulk may wait for room already
        while (
            self._echo is echo
            # ``wait_for`` loses a cancellation that comes together with an answer (Python below
            # 3.12)
        ):
            if not self._pings:
                if self._ending:
                    if last and self._fresh():
                        return
                    # at the end nothing of this node's is before it, and perhaps nothing of the
                    # peer's
                    last = True
                    self._ping()
                else:
                    self._flying.clear()
                    await self._flying.wait()
                continue
            data = b""
            with contextlib.suppress(asyncio.TimeoutError):
                patience = min(
                    PONG_S[0] + PONGS * min(self._bases, default=0.0), PONG_S[1]
                )  # a silent stream is given up soon
                data = await asyncio.wait_for(echo.read(), patience)
            if self._echo is not echo or (not data and self._ending):
                return
            # nothing goes out before an answer: bytes to a peer that is gone would look as if it
            # took them
            if not data:
                self.window, self._starting, self._young = self._least(), True, True
                continue
            ping = self._pings.popleft()
            if data != ping.data:
                raise EOFError("the peer answers pings wrongly")
            self._answer(ping, self._clock() - ping.began)

    def begin(self) -> None:
        """Start a transfer while there is none: bulk waits until the empty link was measured, if it
        never was.
        """
        self._ending, self._starting, self._full = False, True, False
        self._turned, self._before, self._rate, self._quickest = (
            self._clock(),
            self._answered,
            0.0,
            float("inf"),
        )
        self._hold(self.window <= MOST and not self._bases)

    def end(self) -> None:
        """Note that the last transfer has ended: the delay of the empty link is measured if that
        was long ago, and no more.
        """
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
        return (
            max(LEAST, LEAST_RATE * (min(self._bases, default=0.0) + DELAY_S[1])) / self._shared()
        )

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
        if (
            self._ending
            and not self._pings
            and self._quickest > CHANGED * min(self._bases, default=delay) + DELAY_S[0]
        ):
            # so slow from the first ping to the last: the peer, or this machine, is in another
            # network now
            self._bases.clear()
        # Not in the midst of a transfer, where the peer's own bulk delays the answers.
        if (
            self._holding
            or not self._bases
            or (self._ending and not self._pings and not self._fresh())
        ):
            self._bases.append(delay)
            self._measured = self._clock()
            self._hold(False)
        self._bases[-1] = min(self._bases[-1], delay)
        self._delay = min(self._delay, delay)
        # Quicker ones count more: another transfer has ended, and what it leaves free is used at
        # once.
        self._trip += (
            (delay - self._trip) / (PINGS if delay > self._trip else FEWER) if self._trip else delay
        )
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
        self._starting, self._rate = (
            self._starting and (grows or (self._young and queue < DELAY_S[0])),
            rate,
        )
        self._young = self._young and self._starting and (grows or not self._lines)
        surplus = SURPLUS / self._shared() + window / delay * allowed
        aim = (window + window * least / delay + surplus) / 2
        if self._starting:
            aim = (2 if self._young else GROWN) * window if queue < DELAY_S[0] else window
        elif queue < allowed:
            aim = max(aim, (GROWN if queue < DELAY_S[0] else 1.125) * window)
        if (
            self._full
            and delay > 2 * (least + DELAY_S[1])
            and rate < FALLEN * max(self._lines, default=0.0)
        ):
            self._lines.clear()  # the link has become slow
        # So many bytes make no long queue here, whatever the delay. With fewer, of two that send to
        # each other the one with more bytes on their way would starve the other, whose pings wait
        # behind those.
        carried = max(self._lines, default=0.0) * (least + DELAY_S[1])
        flooded = carried > 0 and queue > FLOODED_S
        if aim < window or self._full:  # one that was not filled says nothing of a larger one
            floor, lowest = max(min(carried, window), self._least()), window / 2
            if flooded:
                aim, lowest = min(aim, floor), floor
            self.window = min(max(aim, lowest, floor), 2 * window, float(MOST))
        self._full = False


class Pacer:
    """The paces of the peers to which one host sends bulk.

    ``echo`` pings a peer; it yields None for one that is not paced.
    """

    def __init__(
        self,
        echo: Callable[[str], AbstractAsyncContextManager[Echo | None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._echo, self._clock = echo, clock
        self._paces: OrderedDict[str, Pace] = OrderedDict()
        self._busy = 0  # paces in use

    @contextlib.contextmanager
    def to(self, peer: str) -> Iterator[Pace]:
        """Yield the pace of bulk to ``peer``, which is measured until the end of the block.

        On the loop.
        """
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

    def round_trip(self, peer: str) -> float | None:
        """Return the seconds that the empty link to ``peer`` and back takes; None while that was
        not measured.
        """
        pace = self._paces.get(peer)
        return None if pace is None else min(pace._bases, default=None)

    def forget(self, peer: str) -> None:
        if (pace := self._paces.get(peer)) is not None:
            pace.forget()

    async def _measure(self, peer: str, pace: Pace) -> None:
        try:
            while True:
                async with self._echo(peer) as echo:
                    if echo is None:
                        break
                    await pace.measure(echo)
                if (
                    not pace.users
                ):  # another transfer may have begun while the pings of the last one ended
                    pace.stop()
                    return
        except Exception as error:  # bulk that waits for its pace must go on
            log.debug("bulk to a peer is not paced: %r", error)
        finally:
            pace.task = None
        pace.free()


BULKS, KNOWN_S = (
    8,
    5.0,
)  # times of bulk whose rate counts, and seconds of it from which on it is known

LARGE = (
    256 << 10
    # bytes each way of an exchange that measures its way: fewer have arrived before TCP or QUIC is
    # up to speed
)
# times what a connection past a relay carries, that the relay has to carry to be taken: its bytes
# are others' as well
FASTER = 1.1
EVERY, RARELY = (
    32,
    64,
    # exchanges until the slower way is tried again, as often as the other is faster, and that
    # factor at most
)
FAILED = 0.25  # times what it carried, at least: what a way counts for after it failed
PEERS = 256  # whose ways are remembered


class Ways:
    """The bytes a second that exchanges with each peer moved by each way, and by which way the next
    one goes. On one loop.

    There are two ways: directly or by a relay, and ``past`` the relay (`shoal.swarm.p2p.punch`).
    Both ends see the same bytes and seconds, so they come to the same choice, whoever calls. A way
    that was never tried is tried at once, the slower one so seldom that it costs one `EVERY`-th of
    the time of exchanges.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[str, dict[bool, tuple[float, int]]] = OrderedDict()
        """Peer -> whether past the relay -> bytes a second, 0 if none came, and the exchanges by
        the other way since.
        """

    def note(self, peer: str, past: bool, rate: float) -> None:
        known = self._known.pop(peer, {})
        was = known.get(past, (rate, 0))[0] or rate
        self._known[peer] = {way: (before, since + 1) for way, (before, since) in known.items()} | {
            past: ((rate + was) / 2, 0)
        }
        while len(self._known) > PEERS:
            self._known.popitem(last=False)

    def failed(self, peer: str, past: bool, rate: float = 0.0) -> None:
        """Note an exchange that was given up, or a peer that did not answer, after bytes came at
        ``rate``.
        """
        was = self._known.get(peer, {}).pop(past, (0.0, 0))[0]
        self.note(peer, past, max(FAILED * was, min(rate, was or rate)))

    def forget(self, peer: str) -> None:
        self._known.pop(peer, None)

    def tries(self, peer: str, past: bool) -> bool:
        """Return whether an exchange that goes so now tries what is not the better way, as far as
        is known.
        """
        known = self._known.get(peer, {})
        return (
            (not past) in known
            and past == self.choose(peer)
            and (past not in known or past != self.best(peer))
        )

    def several(self, peer: str) -> bool:
        """Return whether exchanges with ``peer`` have gone past its relay, so that there is a
        choice.
        """
        return True in self._known.get(peer, {})

    def best(self, peer: str) -> bool:
        """Return whether ``past`` is the better way; one that was never tried is, before any
        other.
        """
        known = self._known.get(peer, {})
        return True not in known or (False in known and known[False][0] <= FASTER * known[True][0])

    def choose(self, peer: str) -> bool:
        """Return whether the next exchange goes ``past``: by the better way, or the other if that
        is due.
        """
        past, known = self.best(peer), self._known.get(peer, {})
        rate, (slow, since) = known.get(past, (0.0, 0))[0], known.get(not past, (0.0, 0))
        return past != (since >= EVERY * min(max(rate / slow if slow else 1 / FAILED, 1.0), RARELY))

    def rate(self) -> float:
        """Return the bytes a second of exchanges by the better way, the median of the peers; 0
        while none is known.
        """
        found = [
            max((rate for rate, _ in list(known.values())), default=0.0)
            for known in list(self._known.values())
        ]
        return median(filter(None, found)) if any(found) else 0.0


class TrafficMeter:
    """Counts of the bytes on one host's streams, payload and framing; written by its loop, readable
    from any thread.

    ``upload``: the budget that sends have to keep to. ``pacer``: the pace of bulk to each peer.
    ``clock``: seconds.
    """

    __slots__ = ("_bulk", "_clock", "_since", "pacer", "received", "sent", "upload", "ways")

    def __init__(
        self,
        upload: BandwidthLimiter | None = None,
        pacer: Pacer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sent = 0
        self.received = 0
        self.upload = upload
        self.pacer = pacer
        self.ways = Ways()
        self._clock = clock
        self._bulk = 0  # sends of bulk under way
        self._since: deque[tuple[float, int, float]] = deque(
            maxlen=BULKS
        )  # when bulk began, bytes sent before, when it ended

    def forget(self, peer: str) -> None:
        """Note that ``peer``, or this machine, is in another network: what was measured between
        them counts no more.
        """
        self.ways.forget(peer)
        if self.pacer is not None:
            self.pacer.forget(peer)

    @contextmanager
    def pace(self, way: str, nbytes: int) -> Iterator[Pace | None]:
        """Yield the pace at which ``nbytes`` bytes go to a peer by a ``way`` (`Ways`); None if they
        may go at once.
        """
        if self.pacer is None or nbytes <= LEAST:
            yield None
            return
        if not self._bulk:
            self._since.append((self._clock(), self.sent, math.inf))
        self._bulk += 1
        try:
            with self.pacer.to(way) as pace:
                yield pace
        finally:
            self._bulk -= 1
            if not self._bulk:
                began, before, _ = self._since.pop()
                self._since.append((began, self.sent - before, self._clock()))

    def rate(self) -> float | None:
        """Return the bytes a second that left recently while bulk was sent; None while that is not
        known.
        """
        known, now, under_way = list(self._since), self._clock(), self._bulk
        seconds = sum(min(ended, now) - began for began, _, ended in known)
        nbytes = sum(count for _, count, ended in known if ended < math.inf)
        if under_way and known and known[-1][2] == math.inf:
            nbytes += self.sent - known[-1][1]
        return nbytes / seconds if seconds >= KNOWN_S else None
