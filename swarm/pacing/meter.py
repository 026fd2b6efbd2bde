"""Counts of what one host sends and receives, and what its link was measured to carry."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shoal.swarm.pacing.budget import BandwidthLimiter
from shoal.swarm.pacing.pace import LEAST, Pace, Pacer

BULKS, KNOWN_S = 8, 5.0  # times of bulk whose rate counts, and seconds of it from which on it is known


class TrafficMeter:
    """Counts of the bytes on one host's streams, payload and framing; written by its loop, readable from any thread.

    ``upload``: the budget that sends have to keep to. ``pacer``: the pace of bulk to each peer. ``clock``: seconds.
    """

    __slots__ = ("_bulk", "_clock", "_since", "pacer", "received", "sent", "upload")

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
        self._clock = clock
        self._bulk = 0  # sends of bulk under way
        self._since: deque[tuple[float, int, float]] = deque(maxlen=BULKS)  # when bulk began, bytes sent before, when it ended

    @contextmanager
    def pace(self, peer_id: str, nbytes: int) -> Iterator[Pace | None]:
        """Yield the pace at which ``nbytes`` bytes go to a peer; None if they may go at once."""
        if self.pacer is None or nbytes <= LEAST:
            yield None
            return
        if not self._bulk:
            self._since.append((self._clock(), self.sent, math.inf))
        self._bulk += 1
        try:
            with self.pacer.to(peer_id) as pace:
                yield pace
        finally:
            self._bulk -= 1
            if not self._bulk:
                began, before, _ = self._since.pop()
                self._since.append((began, self.sent - before, self._clock()))

    def rate(self) -> float | None:
        """Return the bytes a second that left while bulk was sent, of late; None while that is not known."""
        known, now, under_way = list(self._since), self._clock(), self._bulk
        seconds = sum(min(ended, now) - began for began, _, ended in known)
        nbytes = sum(count for _, count, ended in known if ended < math.inf)
        if under_way and known and known[-1][2] == math.inf:
            nbytes += self.sent - known[-1][1]
        return nbytes / seconds if seconds >= KNOWN_S else None
