"""Peers that a node leaves alone for a while, as if they were dead: ``PassedOver``.

Why terms end in the same rounds at all nodes: docs/internals.md, "Peers that are passed over".
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.swarm.exchange.terms import FORGOTTEN, REMEMBERED, TERMS, term_end
from shoal.swarm.p2p.newest import Newest

BROKEN = 2  # of the terms for failures; the others are for peers that cost time


class Misses(NamedTuple):
    """What a peer spent of a node's rounds."""

    failures: int = 0
    """In a row."""
    last: int = 0
    """The round of the last one."""
    cost: bool = False
    """It cost time."""
    away: bool = False
    """It could not be reached."""
    returned: bool = False
    """It has shown since that it is there."""


class PassedOver:
    """The peers that one node passes over. ``fragments``: sent in turn."""

    def __init__(self, fragments: int) -> None:
        self._fragments = fragments
        self.misses = Newest[str, Misses](REMEMBERED)
        """Rounds of all fragments count."""
        self._met = -1  # the newest round with an exchange

    def missed(self, peer: str, round: int, over: int = 0, *, away: bool = False) -> None:
        """Note that ``peer`` spent this node's round without an exchange, or so much time that it
        is passed over for ``over`` rounds; ``away``: it could not be reached.
        """
        count, last, cost, _, returned = self.misses.get(peer, Misses())
        # Several meetings with one peer that fail at once, with a fragment each, count as one
        # failure.
        if not count or abs(round - last) >= self._fragments:
            most = len(TERMS) if over else max(count, BROKEN)
            if not count or over or returned or self._met > last:
                count = min(
                    count + 1 if round < self._until(peer) + FORGOTTEN * self._fragments else 1,
                    most,
                )
            last = round
        while (
            1 < count < len(TERMS) and over > TERMS[count - 1] * self._fragments
        ):  # not at first: this node itself may have slept
            count += 1
        self.misses[peer] = Misses(count, last, cost or over > 0, away)

    def met(self, peer: str, round: int) -> None:
        self._met = max(self._met, round)
        self.misses.pop(peer, None)

    def returned(self, peer: str) -> None:
        """Note that ``peer`` is there. If it only could not be reached, once, its term is over; if
        it fails again before it is met, the next one is longer.
        """
        misses = self.misses.get(peer, Misses())
        if misses.away and misses.failures == 1:
            self.misses[peer] = misses._replace(returned=True)

    def at(self, peer: str, round: int) -> bool:
        """Return whether ``peer`` is passed over in ``round``; not in one far before its failure,
        to which this node went back.
        """
        misses = self.misses.get(peer, Misses())
        if misses.returned:
            return False
        return misses.last - self._fragments < round < self._until(peer)

    def once(self, peer: str) -> bool:
        """Return whether ``peer`` has failed once since it was met."""
        return self.misses.get(peer, Misses()).failures == 1

    def costly(self, peer: str) -> bool:
        """Return whether ``peer`` spent this time recently."""
        return self.misses.get(peer, Misses()).cost

    def _until(self, peer: str) -> int:
        """Return the first round in which ``peer`` is no longer passed over."""
        misses = self.misses.get(peer, Misses())
        if not misses.failures:
            return 0
        return term_end(misses.failures, misses.last, self._fragments)
