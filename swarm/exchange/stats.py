"""The recent exchanges of this node: what failed, with which peer and how, and how long transfers took.

Kinds of failures, as seen by the node that counts them:

    unreachable   the peers could not connect
    timeout       connected, and then nothing for longer than a deadline, or not there when its group was formed
    refused       the peer said no, or called it off
    broken        the connection ended in the middle
    damaged       the received bytes are malformed, not as announced, or not finite
    suspicious    well formed, and too far from this node's own (`shoal.swarm.exchange.robust`)

That a peer is busy, or in another round, is no failure. Of each peer only the first failure in a round counts.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from shoal.swarm.errors import MessageError, NetworkError

if TYPE_CHECKING:
    from shoal.optim.exchange.base import RoundKey  # not imported: a process that only reads records, as a seed does, has no torch
from shoal.swarm.wire.fields import FAILURES, MAX_BLAMED, Failure

WINDOW = 64  # exchanges that are remembered: minutes to hours of rounds, so that a mended fault is soon forgotten
RECENT = 8  # transfers whose median is reported: with different partners, so that a slow link shows at its owner


@dataclass(frozen=True)
class Problem:
    """The reason, in a few words, why a contribution cannot be used."""

    kind: Failure
    text: str

    def __str__(self) -> str:
        return self.text


def kind_of(error: NetworkError | MessageError) -> Failure:
    """Return the kind of failure that an error is."""
    for kind in FAILURES:
        if kind == error.reason:
            return kind
    return "broken" if isinstance(error, NetworkError) else "damaged"


class ExchangeStats:
    """The counters of one node's exchanges. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: deque[tuple[RoundKey, str, Failure | None]] = deque(maxlen=WINDOW)
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self.odd = 0
        """Rounds without a partner because the number of peers was odd, which is no failure."""

    def failed(self, key: RoundKey, peer: str, problem: NetworkError | MessageError | Failure) -> None:
        """Count a failed exchange of round ``key`` with ``peer``."""
        kind = problem if isinstance(problem, str) else kind_of(problem)
        with self._lock:
            if not any(known == key and other == peer for known, other, _ in self._events):
                self._events.append((key, peer, kind))

    def done(self, key: RoundKey, seconds: float) -> None:
        """Count a committed exchange whose bytes took ``seconds`` to move."""
        with self._lock:
            self._events.append((key, "", None))
            self._seconds.append(seconds)

    def failures(self, key: RoundKey) -> list[tuple[str, Failure]]:
        """Return the peers with which the exchange ``key``, or what it was moved to, failed, and how."""
        with self._lock:
            events = [(known, peer, kind) for known, peer, kind in self._events if kind is not None]
        return [(peer, kind) for known, peer, kind in events if known.fragment == key.fragment and known.round >= key.round]

    def turned_down(self) -> int:
        """Return how many peers in a row refused this node, or were rejected by it, since its last committed exchange."""
        with self._lock:
            peers = set()
            for _, peer, kind in reversed(self._events):
                if kind is None:
                    break
                if kind in ("refused", "suspicious"):
                    peers.add(peer)
            return len(peers)

    def report(self) -> dict[str, Any]:
        """Return the fields of `shoal.swarm.wire.member.Member` that describe the exchanges."""
        with self._lock:
            events, seconds = list(self._events), list(self._seconds)
        kinds = Counter(kind for _, _, kind in events if kind is not None)
        blamed = Counter((peer, kind) for _, peer, kind in events if kind is not None)
        return {
            "exchange_s": median(seconds) if seconds else 0.0,
            "exchanges": len(events),
            "failures": tuple((kind, kinds[kind]) for kind in FAILURES if kind in kinds),
            "blamed": tuple((peer, kind, count) for (peer, kind), count in blamed.most_common(MAX_BLAMED)),
        }
