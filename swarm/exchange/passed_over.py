"""Peers that a node leaves alone for a while, as if they were dead: ``PassedOver``.

Why terms end in the same rounds at all nodes: docs/internals.md, "Peers that are passed over".
"""

from __future__ import annotations

from shoal.swarm.p2p.newest import Newest

TERMS = (8, 32, 128, 512)  # up to the next multiple of so many rounds of each fragment
BROKEN = 2  # of these terms for failures; the others are for peers that cost time
FORGOTTEN = 64  # rounds after these
REMEMBERED = 1024  # peers


class PassedOver:
    """The peers that one node passes over. ``fragments``: sent in turn."""

    def __init__(self, fragments: int) -> None:
        self._fragments = fragments
        self.misses = Newest[str, tuple[int, int, bool]](REMEMBERED)
        """Peer -> its failures in a row, the round of the last one, and whether it cost time.

        Rounds of all fragments count.
        """
        self._met = -1  # the newest round with an exchange

    def missed(self, peer: str, round: int, over: int = 0) -> None:
        """Note that ``peer`` spent this node's round without an exchange, or so much time that it
        is passed over for ``over`` rounds.
        """
        count, last, cost = self.misses.get(peer, (0, 0, False))
        # Several meetings with one peer that fail at once, with a fragment each, count as one
        # failure.
        if not count or abs(round - last) >= self._fragments:
            most = len(TERMS) if over else max(count, BROKEN)
            if not count or over or self._met > last:
                count = min(
                    count + 1 if round < self._until(peer) + FORGOTTEN * self._fragments else 1,
                    most,
                )
            last = round
        while (
            1 < count < len(TERMS) and over > TERMS[count - 1] * self._fragments
        ):  # not at first: this node itself may have slept
            count += 1
        self.misses[peer] = count, last, cost or over > 0

    def met(self, peer: str, round: int) -> None:
        self._met = max(self._met, round)
        self.misses.pop(peer, None)

    def at(self, peer: str, round: int) -> bool:
        """Return whether ``peer`` is passed over in ``round``; not in one far before its failure,
        to which this node went back.
        """
        _, last, _ = self.misses.get(peer, (0, 0, False))
        return last - self._fragments < round < self._until(peer)

    def once(self, peer: str) -> bool:
        """Return whether ``peer`` has failed once since it was met."""
        return self.misses.get(peer, (0, 0, False))[0] == 1

    def costly(self, peer: str) -> bool:
        """Return whether ``peer`` spent this time recently."""
        return self.misses.get(peer, (0, 0, False))[2]

    def _until(self, peer: str) -> int:
        """Return the first round in which ``peer`` is no longer passed over."""
        count, last, _ = self.misses.get(peer, (0, 0, False))
        term = TERMS[count - 1] * self._fragments if count else 0
        return (last // term + 1) * term if term else 0
