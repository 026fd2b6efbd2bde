"""Lottery of planted claims: known wrong ones that look like others, so that voting without checking does not pay.

Each peer has a secret chain of hashes, link(r) = H(link(r + 1)), whose end, the anchor, it publishes `BEHIND` rounds before its
first round or earlier. The link of a round and the beacon of `BEHIND` rounds before decide which slots of the round the peer
has to fill with a wrong claim. Others learn that only when the peer opens the claim by showing the link, which it should do
when all its claims of the round are settled. The peer cannot choose: the chain was fixed before the beacon was known. So "that
one was planted" is no excuse for a lie, except in the slots that the lottery set aside, whose outputs are for no use.

Known right claims need no lottery: every honest claim is one, and whoever rejects blindly is outvoted on it.
"""

from __future__ import annotations

import hashlib
import hmac

BEHIND = 3  # rounds: the newest beacon that is known when a round begins (see `sortition.OPENS`)
MAX_LENGTH = 2**14  # rounds of a chain; checking a link takes as many hashes at most (about 10 ms)


def _hash(link: bytes) -> bytes:
    return hashlib.sha256(b"shoal/verification/1/chain\x00" + link).digest()


class Chain:
    """Hash chain with a peer's links for the ``length`` rounds after ``start``, from 32 secret bytes. ValueError out of bounds."""

    def __init__(self, secret: bytes, start: int, length: int = MAX_LENGTH) -> None:
        if len(secret) != 32 or not 1 <= length <= MAX_LENGTH:
            raise ValueError(f"a chain needs 32 secret bytes and a length from 1 to {MAX_LENGTH}")
        self.start, self._links = start, [secret]
        for _ in range(length):
            self._links.append(_hash(self._links[-1]))

    @property
    def anchor(self) -> bytes:
        """End of the chain, published in round ``start``."""
        return self._links[-1]

    def link(self, round: int) -> bytes:
        """Return the link of ``round``; showing it reveals those of all earlier rounds. Raises ValueError outside the chain."""
        if not self.start < round < self.start + len(self._links):
            raise ValueError(f"the chain covers rounds {self.start + 1} to {self.start + len(self._links) - 1}, not {round}")
        return self._links[-1 - (round - self.start)]


def belongs(link: bytes, anchor: bytes, steps: int) -> bool:
    """Return whether ``link`` is the one of ``steps`` rounds after the anchor's."""
    if not 0 < steps <= MAX_LENGTH:
        return False
    for _ in range(steps):
        link = _hash(link)
    return link == anchor


def must_plant(link: bytes, beacon: bytes, slot: int, share: float) -> bool:
    """Return whether the claim in ``slot`` of the link's round is planted; ``beacon``: of `BEHIND` rounds before."""
    drawn = hmac.new(link, b"plant\x00" + beacon + slot.to_bytes(4, "big"), hashlib.sha256).digest()
    return int.from_bytes(drawn[:8], "big") < share * 2**64
