"""Addresses that a watcher can dial, and the time of the next attempt."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable

from shoal.swarm.access.link import address_problem

AGAIN_S = 6.0  # seconds (libp2p itself puts a dial off for 5) before the same peer is dialled again, doubled with each failure
AGAIN_MAX_S = 60.0
MOST_FAILURES = 30  # failures that are counted
MAX_KNOWN = 1024  # peers whose addresses are kept


class PeerAddresses:
    """Addresses by peer, bounded, and when each peer may be dialled again."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[str, ...]] = OrderedDict()
        self._failures: dict[str, int] = {}
        self._after: dict[str, float] = {}

    def learn(self, peer: str, addresses: Iterable[str]) -> None:
        """Replace the addresses of ``peer``."""
        usable = tuple(a for a in addresses if address_problem(a) is None and a.endswith(f"/p2p/{peer}"))
        if not usable:
            return
        self._known[peer] = usable
        self._known.move_to_end(peer)
        while len(self._known) > MAX_KNOWN:
            gone, _ = self._known.popitem(last=False)
            self._failures.pop(gone, None)
            self._after.pop(gone, None)

    def addresses(self, peer: str) -> tuple[str, ...]:
        return self._known.get(peer, ())

    def tried(self, peer: str, now: float, *, reached: bool) -> None:
        """Note the outcome of an attempt."""
        if peer not in self._known:
            return
        failures = self._failures[peer] = 0 if reached else min(self._failures.get(peer, 0) + 1, MOST_FAILURES)
        self._after[peer] = now + min(AGAIN_S * 2.0 ** (failures - 1), AGAIN_MAX_S)

    def due(self, now: float, but: Iterable[str]) -> list[str]:
        """Return the peers that may be dialled now, those that failed least first."""
        left_out = set(but)
        found = [peer for peer in self._known if peer not in left_out and self._after.get(peer, 0.0) <= now]
        random.shuffle(found)
        return sorted(found, key=lambda peer: self._failures.get(peer, 0))
