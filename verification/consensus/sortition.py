"""Sortition: verifiers of a claim are drawn by rank of HMAC(beacon, case, peer), from a seed that
nobody controls alone.

    seed = beacon(run, round, salts)                   # salts of the votes on the round before
    draws = draw_verifiers(Electorate(round, seed, operators), claim.id, size=3)

When a beacon is made, and why its last contributor gains nothing: docs/internals.md, "The beacon of
a round".
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from shoal.verification.consensus.records import ATTEMPTS, MAX_SEATS

OPENS = 2
"""Rounds after its own in which a round's verifiers are drawn."""
SETTLED = 4
"""Rounds after its own in which a round's claims are decided and the planted ones opened, so that
its scores are settled.
"""
LEAST = 3
"""Verifiers of a draw, at least: with fewer a single peer would decide."""


@dataclass(frozen=True)
class Electorate:
    """Peers that may be drawn for what was published in ``round``.

    All must use the same electorate: another leads to another draw, whose votes count for nobody
    else.
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
    """Make the beacon of ``round`` from the salts of votes that count on claims of the round
    before, in any order, once each.
    """
    place = len(run).to_bytes(4, "big") + run.encode() + round.to_bytes(8, "big")
    mixed = hashlib.sha256(b"shoal/verification/1/beacon\x00" + place)
    for salt in sorted(set(salts)):
        mixed.update(hashlib.sha256(salt).digest())
    return mixed.digest()


def rank(beacon: bytes, case: bytes, peer: str) -> bytes:
    """Return the 32 bytes that rank ``peer`` for ``case``."""
    return hmac.digest(beacon, b"draw\x00" + case + peer.encode(), "sha256")


def is_audited(beacon: bytes, claim: bytes, rate: float) -> bool:
    """Return whether the claim is among the share ``rate`` (0 to 1) that is checked; its author
    cannot know beforehand.
    """
    drawn = hmac.new(beacon, b"audit\x00" + claim, hashlib.sha256).digest()
    return int.from_bytes(drawn[:8], "big") < rate * 2**64


def draw_verifiers(
    electorate: Electorate, case: bytes, size: int, without: Collection[str] = ()
) -> tuple[tuple[str, ...], ...]:
    """Draw the verifiers of each attempt at ``case``: disjoint, ``size`` peers of different
    operators, none of ``without``'s.

    ``without``: operators. If there are too few peers an attempt has the largest odd number there
    is, if that is at least `LEAST`; later attempts have as many verifiers as the first, or do not
    exist. Raises ValueError for an even size, or one beyond 31.
    """
    if size % 2 == 0 or not LEAST <= size <= MAX_SEATS:
        raise ValueError(
            f"a draw has an odd number of verifiers from {LEAST} to {MAX_SEATS}, got {size}"
        )
    used = set(without)
    drawn: list[str] = []
    for peer in sorted(electorate.operators, key=lambda peer: rank(electorate.beacon, case, peer)):
        operator = electorate.operators[peer]
        if operator in used:
            continue
        used.add(operator)
        drawn.append(peer)
        if len(drawn) == size * ATTEMPTS:
            break
    largest_odd = len(drawn) if len(drawn) % 2 else len(drawn) - 1
    size = min(size, largest_odd)
    if size < LEAST:
        return ()
    starts = range(0, len(drawn) - size + 1, size)
    draws = tuple(tuple(drawn[start : start + size]) for start in starts)
    return draws[:ATTEMPTS]
