"""Counts of what one host sends and receives, and what its link and its ways to others were measured to carry."""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

from shoal.swarm.pacing.budget import BandwidthLimiter
from shoal.swarm.pacing.pace import LEAST, Pace, Pacer

BULKS, KNOWN_S = 8, 5.0  # times of bulk whose rate counts, and seconds of it from which on it is known

LARGE = 256 << 10  # bytes each way of an exchange that measures its way: fewer have arrived before TCP or QUIC is up to speed
FASTER = 1.1  # times what a connection past a relay carries, that the relay has to carry to be taken: its bytes are others' as well
EVERY, MOST = 32, 64  # exchanges until the slower way is tried again, as often as the other is faster, and that factor at most
FAILED = 0.25  # times what it carried, at least: what a way counts for after it failed
PEERS = 256  # whose ways are remembered


class Ways:
    """The bytes a second that exchanges with each peer moved by each way, and by which way the next one goes. On one loop.

    There are two ways: directly or by a relay, and ``past`` the relay (`shoal.swarm.p2p.punch`). Both ends see the same bytes and
    seconds, so they come to the same choice, whoever calls. A way that was never tried is tried at once, the slower one so seldom
    that it costs one `EVERY`-th of the time of exchanges.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[str, dict[bool, tuple[float, int]]] = OrderedDict()
        """Peer -> whether past the relay -> bytes a second, 0 if none came, and the exchanges by the other way since."""

    def note(self, peer: str, past: bool, rate: float) -> None:
        """Note an exchange at ``rate``."""
        known = self._known.pop(peer, {})
        was = known.get(past, (rate, 0))[0] or rate
        self._known[peer] = {way: (before, since + 1) for way, (before, since) in known.items()} | {past: ((rate + was) / 2, 0)}
        while len(self._known) > PEERS:
            self._known.popitem(last=False)

    def failed(self, peer: str, past: bool, rate: float = 0.0) -> None:
        """Note an exchange that was given up, or a peer that did not answer, after bytes came at ``rate``."""
        was = self._known.get(peer, {}).pop(past, (0.0, 0))[0]
        self.note(peer, past, max(FAILED * was, min(rate, was or rate)))

    def forget(self, peer: str) -> None:
        """Forget what was measured with ``peer``."""
        self._known.pop(peer, None)

    def tries(self, peer: str, past: bool) -> bool:
        """Return whether an exchange that goes so now tries what is not the better way, as far as is known."""
        known = self._known.get(peer, {})
        return (not past) in known and past == self.choose(peer) and (past not in known or past != self.best(peer))

    def several(self, peer: str) -> bool:
        """Return whether exchanges with ``peer`` have gone past its relay, so that there is a choice."""
        return True in self._known.get(peer, {})

    def best(self, peer: str) -> bool:
        """Return whether ``past`` is the better way; one that was never tried is, before any other."""
        known = self._known.get(peer, {})
        return True not in known or (False in known and known[False][0] <= FASTER * known[True][0])

    def choose(self, peer: str) -> bool:
        """Return whether the next exchange goes ``past``: by the better way, or the other if that is due."""
        past, known = self.best(peer), self._known.get(peer, {})
        rate, (slow, since) = known.get(past, (0.0, 0))[0], known.get(not past, (0.0, 0))
        return past != (since >= EVERY * min(max(rate / slow if slow else 1 / FAILED, 1.0), MOST))

    def rate(self) -> float:
        """Return the bytes a second of exchanges by the better way, the median of the peers; 0 while none is known."""
        found = [max((rate for rate, _ in known.values()), default=0.0) for known in list(self._known.values())]
        return median(filter(None, found)) if any(found) else 0.0


class TrafficMeter:
    """Counts of the bytes on one host's streams, payload and framing; written by its loop, readable from any thread.

    ``upload``: the budget that sends have to keep to. ``pacer``: the pace of bulk to each peer. ``clock``: seconds.
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
        self._since: deque[tuple[float, int, float]] = deque(maxlen=BULKS)  # when bulk began, bytes sent before, when it ended

    def forget(self, peer: str) -> None:
        """Note that ``peer``, or this machine, is in another network: what was measured between them counts no more."""
        self.ways.forget(peer)
        if self.pacer is not None:
            self.pacer.forget(peer)

    @contextmanager
    def pace(self, way: str, nbytes: int) -> Iterator[Pace | None]:
        """Yield the pace at which ``nbytes`` bytes go to a peer by a ``way`` (`Ways`); None if they may go at once."""
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
        """Return the bytes a second that left recently while bulk was sent; None while that is not known."""
        known, now, under_way = list(self._since), self._clock(), self._bulk
        seconds = sum(min(ended, now) - began for began, _, ended in known)
        nbytes = sum(count for _, count, ended in known if ended < math.inf)
        if under_way and known and known[-1][2] == math.inf:
            nbytes += self.sent - known[-1][1]
        return nbytes / seconds if seconds >= KNOWN_S else None
