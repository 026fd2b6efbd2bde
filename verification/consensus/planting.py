"""Lottery of planted claims: known wrong ones that look like others.

So voting without checking does not pay.

    chain = Chain(secret, start=10)                    # chain.anchor is published with the entry
    must_plant(chain.link(14), beacon, slot=0, share=0.05)
    belongs(chain.link(14), chain.anchor, steps=4)     # what others check once the link is shown

Why nobody can choose what to plant: docs/internals.md, "Planted claims".
"""

from __future__ import annotations

import hashlib
import hmac

BEHIND = 3
"""Rounds by which the beacon of a lottery is older than its claims: the newest beacon that is known
when a round begins (see `shoal.verification.consensus.sortition.OPENS`).
"""
MAX_LENGTH = 2**14
"""Rounds of a chain; checking a link takes as many hashes at most (about 10 ms)."""
SECRET_BYTES = 32
"""Bytes of the secret that a chain begins with."""


class Chain:
    """Hash chain with a peer's links for the ``length`` rounds after ``start``, from 32 secret
    bytes. ValueError out of bounds.
    """

    def __init__(self, secret: bytes, start: int, length: int = MAX_LENGTH) -> None:
        if len(secret) != SECRET_BYTES or not 1 <= length <= MAX_LENGTH:
            raise ValueError(
                f"a chain needs {SECRET_BYTES} secret bytes and a length from 1 to {MAX_LENGTH}"
            )
        self.start = start
        self._links = [secret]
        for _ in range(length):
            self._links.append(_hash(self._links[-1]))

    @property
    def anchor(self) -> bytes:
        return self._links[-1]

    def link(self, round: int) -> bytes:
        """Return the link of ``round``; showing it reveals those of all earlier rounds.

        Raises ValueError outside the chain.
        """
        last = self.start + len(self._links) - 1
        if not self.start < round <= last:
            raise ValueError(f"the chain covers rounds {self.start + 1} to {last}, not {round}")
        return self._links[-1 - (round - self.start)]


def belongs(link: bytes, anchor: bytes, steps: int) -> bool:
    """Return whether ``link`` is the one of ``steps`` rounds after the anchor's."""
    if not 0 < steps <= MAX_LENGTH:
        return False
    for _ in range(steps):
        link = _hash(link)
    return link == anchor


def must_plant(link: bytes, beacon: bytes, slot: int, share: float) -> bool:
    """Return whether the claim in ``slot`` of the link's round is planted; ``beacon``: of `BEHIND`
    rounds before.
    """
    drawn = hmac.new(link, b"plant\x00" + beacon + slot.to_bytes(4, "big"), hashlib.sha256).digest()
    return int.from_bytes(drawn[:8], "big") < share * 2**64


def _hash(link: bytes) -> bytes:
    return hashlib.sha256(b"shoal/verification/1/chain\x00" + link).digest()
