"""The newest envelopes that were pushed: a new neighbour gets them, so that it does not miss what
was on its way when it came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from shoal.swarm.p2p.newest import Newest

MAX_ENVELOPES = 64
MAX_BYTES = 1 << 20
MAX_AGE_S = 15.0
MAX_PEERS = 4096
"""Peers of which is remembered until when they have all, in each direction."""


class Envelope(NamedTuple):
    """An envelope of a topic, with the digest by which it is recognised."""

    topic: str
    digest: bytes
    data: bytes


class RecentEnvelopes:
    """Envelopes of the last `MAX_AGE_S` seconds, the newest of them within the bounds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kept: deque[tuple[float, Envelope]] = deque()
        self._nbytes = 0
        self._caught_up = Newest[tuple[str, bool], float](2 * MAX_PEERS)
        """Peer, and whether this node opened the stream -> when it was given the recent ones."""

    def add(self, envelope: Envelope) -> None:
        now = self._clock()
        self._kept.append((now, envelope))
        self._nbytes += len(envelope.data)
        while self._kept and (
            len(self._kept) > MAX_ENVELOPES
            or self._nbytes > MAX_BYTES
            or self._kept[0][0] < now - MAX_AGE_S
        ):
            _, old = self._kept.popleft()
            self._nbytes -= len(old.data)

    def since_last(self, peer: str, *, is_drawn: bool) -> Iterator[Envelope]:
        """Yield what was added since this was called for ``peer`` last: who opens one stream after
        the other gets each once.

        ``is_drawn``: this node opened the stream. Each direction counts by itself: of two streams
        that were opened at once one is given up, perhaps unread, and the other must have all.
        """
        now = self._clock()
        key = peer, is_drawn
        oldest = max(now - MAX_AGE_S, self._caught_up.get(key, now - MAX_AGE_S))
        self._caught_up[key] = now
        for when, envelope in self._kept:
            if when >= oldest:
                yield envelope
