"""What neighbours in the gossip may hand over, and what they did wrong: who passes on what it
should have refused is left alone for a while.

A fault is what any honest neighbour would have refused too, whatever else it has seen.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.swarm.p2p.addresses import range_of
from shoal.swarm.p2p.newest import Newest
from shoal.swarm.p2p.rate_limit import RateLimit, TokenBuckets

HANDED_OVER = RateLimit(messages=12_000, nbytes=256 << 20)
"""By one neighbour in a minute; beyond it is read no faster."""
FAULTS = RateLimit(messages=16, period=600.0)
"""Of one neighbour until it is shunned."""
FAULTS_OF_RANGE = RateLimit(messages=64, period=600.0)
"""The same of an address range: keys cost nothing."""
SHUNNED_S = 600.0
"""For which no stream is opened to a peer or address range, nor accepted."""
MAX_SHUNNED = 4096


class NeighbourFaults:
    """Budgets of each neighbour and of its address range, and who is shunned."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._handed_over = TokenBuckets(HANDED_OVER, clock)
        self._faults = TokenBuckets(FAULTS, clock)
        self._faults_of_range = TokenBuckets(FAULTS_OF_RANGE, clock)
        self._shunned = Newest[str, float](MAX_SHUNNED)
        """Peer or address range -> until when."""

    def may_hand_over(self, peer: str, nbytes: int) -> bool:
        """Count a message of ``nbytes``, and return whether it is within the peer's budget."""
        return self._handed_over.take(peer, 1, nbytes)

    def blame(self, peer: str, origin: str) -> bool:
        """Count a fault of ``peer``, whose address is ``origin`` ("": not known); return whether it
        may stay. Otherwise it is shunned, and its address range too if that has too many.
        """
        address_range = range_of(origin)
        may_stay = self._faults.take(peer, 1, 0)
        if address_range and not self._faults_of_range.take(address_range, 1, 0):
            self._shunned[address_range] = self._clock() + SHUNNED_S
            may_stay = False
        if not may_stay:
            self.shun(peer)
        return may_stay

    def shun(self, peer: str) -> None:
        """Have no stream with ``peer`` for a while."""
        self._shunned[peer] = self._clock() + SHUNNED_S

    def is_shunned(self, peer: str, origin: str) -> bool:
        now = self._clock()
        return any(self._shunned.get(key, 0.0) > now for key in (peer, range_of(origin)))
