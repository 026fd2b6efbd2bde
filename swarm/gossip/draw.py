"""Whom a node asks to be its neighbour in the gossip: members in an order of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping

from shoal.swarm.p2p.addresses import by_turns
from shoal.swarm.p2p.newest import Newest
from shoal.swarm.wire.envelope import fresh_nonce

RETRY_S = (1.0, 2.0, 5.0, 15.0, 60.0)
"""Before a member that was not reached is tried again; the last repeats."""
MAX_FAILED = 4096


class Draw:
    """The order in which members are dialled, by a hash that nobody else can compute, and which of
    them were not reached of late.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._salt = fresh_nonce()
        self._failed = Newest[str, tuple[int, float]](MAX_FAILED)
        """Peer -> failures in a row, and when it may be tried again."""

    def order(
        self, members: Mapping[str, tuple[str, ...]], origins: Mapping[str, str]
    ) -> Iterator[str]:
        """Yield the peers of ``members`` (peer id -> addresses), one of each address range in turn;
        those that have only a relay last. ``origins``: peer id -> host.
        """
        drawn: tuple[list[tuple[str, str]], list[tuple[str, str]]] = ([], [])
        for peer in sorted(members, key=self._hash):
            is_relayed = all("/p2p-circuit" in address for address in members[peer])
            drawn[is_relayed].append((peer, origins[peer]))
        yield from by_turns(drawn[False])
        yield from by_turns(drawn[True])

    def _hash(self, peer: str) -> bytes:
        return hashlib.sha256(self._salt + peer.encode()).digest()

    def may_dial(self, peer: str) -> bool:
        _, again_at = self._failed.get(peer, (0, 0.0))
        return again_at <= self._clock()

    def failed(self, peer: str) -> None:
        """Leave ``peer`` for a while, longer from time to time."""
        failures = min(self._failed.get(peer, (0, 0.0))[0], len(RETRY_S) - 1)
        self._failed[peer] = failures + 1, self._clock() + RETRY_S[failures]

    def reached(self, peer: str) -> None:
        self._failed.pop(peer, None)
