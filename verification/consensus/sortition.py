"""Sortition: verifiers of a claim are drawn by rank of HMAC(beacon, case, peer), from a seed that nobody controls alone.

A prover must not know who will check a claim while it can still try others, so the beacon of a round is made of salts that are
revealed when no claim of the round is taken any more:

    round r        claims of r are published
    round r + 1    the votes on claims of r - 1 are hidden and revealed; their salts make the beacon of r
    round r + 2    begins with views (`quorum`) and `Consensus.open`: verifiers are drawn for the claims of r, and check them
    round r + 3    authors open what they planted in r, if it is decided
    round r + 4    the reputation of r can be computed; later it changes by disputes only

A salt is fixed by its commitment before any other is seen; the last one to reveal can only withhold its own, which chooses between
two beacons and costs as much as a wrong vote. Beacons are not chained: that of r follows from the records of r - 1 alone, so a
newcomer needs no history. A round whose claims got no vote gives a beacon that could be known beforehand.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from shoal.verification.consensus.records import ATTEMPTS, MAX_SEATS

# Lottery of planted claims: known wrong ones that look like others, so that voting without checking does not pay.
#
# Each peer has a secret chain of hashes, link(r) = H(link(r + 1)), whose end, the anchor, it publishes `BEHIND` rounds before its
# first round or earlier. The link of a round and the beacon of `BEHIND` rounds before decide which slots of the round the peer
# has to fill with a wrong claim. Others learn that only when the peer opens the claim by showing the link, which it should do
# when all its claims of the round are settled. The peer cannot choose: the chain was fixed before the beacon was known. So "that
# one was planted" is no excuse for a lie, except in the slots that the lottery set aside, whose outputs are for no use.
#
# Known right claims need no lottery: every honest claim is one, and whoever rejects blindly is outvoted on it.

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


OPENS = 2  # rounds after its own in which a round's verifiers are drawn
SETTLED = 4  # rounds after its own in which a round's claims are decided, and the planted ones opened: its scores are settled
LEAST = 3  # verifiers: with fewer a single peer would decide


@dataclass(frozen=True)
class Electorate:
    """Peers that may be drawn for what was published in ``round``. All must use the same electorate: another leads to another draw,
    whose votes count for nobody else.
    """

    round: int
    beacon: bytes
    """32 bytes."""
    operators: Mapping[str, str]
    """Peer id to operator, of the peers that may be drawn (see `electorate`)."""
    claims: frozenset[bytes] | None = None
    """Ids of the claims that are verified. None: of all claims, the share that `is_audited`."""

    def __post_init__(self) -> None:
        if len(self.beacon) != 32:
            raise ValueError(f"a beacon has 32 bytes, got {len(self.beacon)}")


def beacon(run: str, round: int, salts: Iterable[bytes]) -> bytes:
    """Make the beacon of ``round`` from the salts of votes that count on claims of the round before, in any order, once each."""
    place = len(run).to_bytes(4, "big") + run.encode() + round.to_bytes(8, "big")
    mixed = hashlib.sha256(b"shoal/verification/1/beacon\x00" + place)
    for salt in sorted(set(salts)):
        mixed.update(hashlib.sha256(salt).digest())
    return mixed.digest()


def rank(beacon: bytes, case: bytes, peer: str) -> bytes:
    """Return the 32 bytes that rank ``peer`` for ``case``."""
    return hmac.new(beacon, b"draw\x00" + case + peer.encode(), hashlib.sha256).digest()


def is_audited(beacon: bytes, claim: bytes, rate: float) -> bool:
    """Return whether the claim is among the share ``rate`` (0 to 1) that is checked; its author cannot know beforehand."""
    drawn = hmac.new(beacon, b"audit\x00" + claim, hashlib.sha256).digest()
    return int.from_bytes(drawn[:8], "big") < rate * 2**64


def draw_verifiers(electorate: Electorate, case: bytes, size: int, without: Collection[str] = ()) -> tuple[tuple[str, ...], ...]:
    """Draw the verifiers of each attempt at ``case``: disjoint, ``size`` peers of different operators, none of ``without``'s.

    ``without``: operators. If there are too few peers an attempt has the largest odd number there is, if that is at least
    `LEAST`; later attempts have as many verifiers as the first, or do not exist. Raises ValueError for an even size, or one
    beyond 31.
    """
    if size % 2 == 0 or not LEAST <= size <= MAX_SEATS:
        raise ValueError(f"a draw has an odd number of verifiers from {LEAST} to {MAX_SEATS}, got {size}")
    used, drawn = set(without), []
    for peer in sorted(electorate.operators, key=lambda peer: rank(electorate.beacon, case, peer)):
        if (operator := electorate.operators[peer]) not in used:
            used.add(operator)
            drawn.append(peer)
            if len(drawn) == size * ATTEMPTS:
                break
    size = min(size, len(drawn) - (len(drawn) % 2 == 0))
    if size < LEAST:
        return ()
    return tuple(tuple(drawn[start : start + size]) for start in range(0, len(drawn) - size + 1, size))[:ATTEMPTS]
