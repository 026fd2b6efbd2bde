"""The choice of the route to a peer, by what exchanges moved over each.

There are two routes: the usual one, directly or over a relay, and the punched one past that relay
(`shoal.swarm.p2p.punch`).
"""

from __future__ import annotations

from collections import OrderedDict
from statistics import median
from typing import NamedTuple

# Bytes each way of an exchange that measures its route: fewer have arrived before TCP or QUIC is up
# to speed.
MEASURED_BYTES = 256 << 10
# Times what the punched connection carries, that a relay has to carry to be taken: its bytes are
# others' as well.
RELAY_ADVANTAGE = 1.1
# Exchanges until the slower route is tried again, times how much faster the other is: trials cost
# one part in so many of the time of exchanges ...
TRIAL_EXCHANGES = 32
MAX_TRIAL_FACTOR = 64  # ... and that factor at most
FAILED_SHARE = 0.25  # of what a route carried, at least: what it counts for after it failed
MAX_PEERS = 256  # whose routes are remembered


class RouteRecord(NamedTuple):
    """What exchanges moved over one route to one peer."""

    rate: float = 0.0
    """Bytes a second; 0 if none came."""
    exchanges_since: int = 0
    """Exchanges over the other route since it was last taken."""


class Routes:
    """The rates of exchanges with each peer over each route, and which one the next takes.

    On one loop. Both ends see the same bytes and seconds, so they come to the same choice, whoever
    calls. A route that was never tried is tried at once.
    """

    def __init__(self) -> None:
        # Peer -> whether it is the punched route -> what is known of it.
        self._known: OrderedDict[str, dict[bool, RouteRecord]] = OrderedDict()

    def note(self, peer: str, punched: bool, rate: float) -> None:
        """Note an exchange that moved bytes at ``rate``."""
        known = self._known.pop(peer, {})
        earlier = known.get(punched, RouteRecord()).rate or rate
        for route, (route_rate, since) in known.items():
            known[route] = RouteRecord(route_rate, since + 1)
        known[punched] = RouteRecord((rate + earlier) / 2)
        self._known[peer] = known
        while len(self._known) > MAX_PEERS:
            self._known.popitem(last=False)

    def failed(self, peer: str, punched: bool, rate: float = 0.0) -> None:
        """Note an exchange that was given up, or a peer that did not answer, after bytes came at
        ``rate``.
        """
        earlier = self._known.get(peer, {}).pop(punched, RouteRecord()).rate
        credited = min(rate, earlier or rate)  # it was not given up for being quick
        self.note(peer, punched, max(FAILED_SHARE * earlier, credited))

    def forget(self, peer: str) -> None:
        self._known.pop(peer, None)

    def is_trial(self, peer: str, punched: bool) -> bool:
        """Return whether an exchange over this route now tries what is not the better one, as far
        as is known.
        """
        known = self._known.get(peer, {})
        if (not punched) not in known or punched != self.choose(peer):
            return False
        return punched not in known or punched != self.best(peer)

    def has_choice(self, peer: str) -> bool:
        """Return whether exchanges with ``peer`` have gone past its relay."""
        return True in self._known.get(peer, {})

    def best(self, peer: str) -> bool:
        """Return whether the punched route is the better; if it was never tried, it is."""
        known = self._known.get(peer, {})
        if True not in known:
            return True
        return False in known and known[False].rate <= RELAY_ADVANTAGE * known[True].rate

    def choose(self, peer: str) -> bool:
        """Return whether the next exchange takes the punched route: the better one, or the other if
        that is due.
        """
        better = self.best(peer)
        known = self._known.get(peer, {})
        rate = known.get(better, RouteRecord()).rate
        slower = known.get(not better, RouteRecord())
        factor = 1 / FAILED_SHARE
        if slower.rate:
            factor = rate / slower.rate
        wait = TRIAL_EXCHANGES * min(max(factor, 1.0), MAX_TRIAL_FACTOR)
        if slower.exchanges_since >= wait:
            return not better
        return better

    def rate(self) -> float:
        """Return the bytes a second of exchanges by the better route, the median of the peers; 0
        while none is known. Readable from any thread.
        """
        rates = []
        for known in list(self._known.values()):
            best = max((record.rate for record in list(known.values())), default=0.0)
            if best:
                rates.append(best)
        return median(rates) if rates else 0.0
