"""Counts of what one host sends and receives, with its budget, paces and routes."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shoal.swarm.pacing.bandwidth import BandwidthLimiter
from shoal.swarm.pacing.pace import Pace
from shoal.swarm.pacing.pacer import Pacer
from shoal.swarm.pacing.routes import Routes
from shoal.swarm.pacing.window import MIN_WINDOW_BYTES

BULK_PERIODS_KEPT = 8  # times of bulk whose rate counts
RATE_KNOWN_S = 5.0  # of bulk from which on its rate is known


@dataclass(frozen=True)
class _BulkPeriod:
    """A time in which bulk was sent without a pause."""

    began: float
    ended: float
    """Infinity while it is under way."""
    nbytes: int
    """Bytes that left in it; while it is under way those that had left before it."""


class TrafficMeter:
    """Counts of the bytes on one host's streams, payload and framing; written by its loop, readable
    from any thread.

    ``upload``: the budget that sends have to keep to. ``pacer``: the pace of bulk to each peer.
    ``clock``: seconds.
    """

    __slots__ = (
        "_bulk",
        "_clock",
        "_periods",
        "gossip_received",
        "gossip_sent",
        "pacer",
        "received",
        "routes",
        "sent",
        "upload",
    )

    def __init__(
        self,
        upload: BandwidthLimiter | None = None,
        pacer: Pacer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sent = 0
        self.received = 0
        self.gossip_sent = 0
        """Those of ``sent`` on streams of gossip: they go on while nothing else does."""
        self.gossip_received = 0
        self.upload = upload
        self.pacer = pacer
        self.routes = Routes()
        self._clock = clock
        self._bulk = 0  # sends of bulk under way
        self._periods: deque[_BulkPeriod] = deque(maxlen=BULK_PERIODS_KEPT)

    def beside_gossip(self) -> int:
        """Return the bytes that were sent and received on all streams but those of gossip."""
        return self.sent - self.gossip_sent + self.received - self.gossip_received

    def forget(self, peer: str) -> None:
        """Note that ``peer``, or this machine, is in another network: what was measured between
        them counts no more.
        """
        self.routes.forget(peer)
        if self.pacer is not None:
            self.pacer.forget(peer)

    @contextlib.contextmanager
    def pace(self, daemon_id: str, nbytes: int) -> Iterator[Pace | None]:
        """Yield the pace at which ``nbytes`` bytes go to a peer's daemon; None if they may go at
        once.
        """
        if self.pacer is None or nbytes <= MIN_WINDOW_BYTES:
            yield None
            return
        if not self._bulk:
            self._periods.append(_BulkPeriod(self._clock(), math.inf, self.sent))
        self._bulk += 1
        try:
            with self.pacer.to(daemon_id) as pace:
                yield pace
        finally:
            self._bulk -= 1
            if not self._bulk:
                period = self._periods.pop()
                sent = self.sent - period.nbytes
                self._periods.append(_BulkPeriod(period.began, self._clock(), sent))

    def rate(self) -> float | None:
        """Return the bytes a second that left recently while bulk was sent; None while that is not
        known.
        """
        periods = list(self._periods)
        now = self._clock()
        seconds = 0.0
        nbytes = 0
        for period in periods:
            seconds += min(period.ended, now) - period.began
            if period.ended < math.inf:
                nbytes += period.nbytes
        if self._bulk and periods and periods[-1].ended == math.inf:
            nbytes += self.sent - periods[-1].nbytes
        return nbytes / seconds if seconds >= RATE_KNOWN_S else None
