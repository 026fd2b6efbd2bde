"""What a partner counts at most, by what it has shown to this node.

A key costs nothing, so a hostile peer can come under a new one as often as it likes. A peer is a newcomer until 3 of its
contributions counted here, or it has been in view for 32 exchanges of this node. Its contribution counts at most half as much as
another's, and the more newcomers of one address range counted in the last 16 exchanges, the less each: 1/2, 1/4, 1/6 ... of it.
However many keys come from a range, in 16 exchanges they have at most the influence of 1.7 contributions of known peers, and of .5
if they go on.

Nobody is a newcomer to a node that has done fewer than 32 exchanges: to one that has just come all others are new.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

from shoal.optim.exchange.robust import GRID

SHOWN, PATIENCE, RECENT = 3, 32, 16
KNOWN = 4096  # peers remembered, those seen last


class Newcomers:
    """The partners that a node has seen, for both its threads. ``where``: returns the address range of a peer."""

    def __init__(self, where: Callable[[str], str] = lambda peer: "") -> None:
        self.where = where
        self._lock = threading.Lock()
        self._exchanges = 0
        self._known: OrderedDict[str, list[int]] = OrderedDict()
        """Of each peer the number of exchanges before it was seen, and of its contributions that counted."""
        self._recent: deque[str | None] = deque(maxlen=RECENT)

    def see(self, peers: Iterable[str]) -> None:
        """Note that ``peers`` are in view."""
        with self._lock:
            for peer in peers:
                self._entry(peer)

    def take(self, peer: str, share: int) -> int:
        """Return at most ``share``, of ``GRID``, for the contribution of ``peer`` to an exchange, and note that it counted."""
        with self._lock:
            since, counted = entry = self._entry(peer)
            new = self._exchanges >= PATIENCE and counted < SHOWN and self._exchanges - since < PATIENCE
            where = self.where(peer) if new and share else None
            if where is not None:
                share = min(share, GRID // (4 * (1 + self._recent.count(where))))
            self._recent.append(where)
            self._exchanges += 1
            entry[1] += share > 0
        return share

    def _entry(self, peer: str) -> list[int]:
        entry = self._known.setdefault(peer, [self._exchanges, 0])
        self._known.move_to_end(peer)
        if len(self._known) > KNOWN:
            self._known.popitem(last=False)
        return entry
