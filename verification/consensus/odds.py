"""Odds of a vote: how often n drawn verifiers accept a wrong claim, or reject an honest one, in
closed form.

    vote(3, collude=0.1).wrong_accepted                # 0.033

Model: a verifier that works misses a wrong claim with probability ``miss`` and rejects a good one
with probability ``alarm``. A colluding one votes against the truth each time; a lazy one approves
without looking. The claim is decided by the majority of n.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb


@dataclass(frozen=True)
class Odds:
    """Probabilities for one claim."""

    wrong_accepted: float
    honest_rejected: float


def vote(
    n: int,
    collude: float = 0.0,
    *,
    lazy: float = 0.0,
    miss: float = 0.01,
    alarm: float = 0.01,
    population: int | None = None,
) -> Odds:
    """Return the odds of a claim before ``n`` (odd) drawn verifiers, of a population with these
    shares of colluding and lazy peers.

    >>> f"{vote(3, 0.1).wrong_accepted:.1%}"
    '3.3%'
    """
    if n % 2 == 0:
        raise ValueError(f"a vote needs an odd number of verifiers, got {n}")
    if not (lazy >= 0 and collude + lazy <= 1 and 0 <= miss <= 1 and 0 <= alarm <= 1):
        raise ValueError(
            "shares and probabilities are from 0 to 1, and colluding and lazy peers together at "
            "most 1"
        )
    need = n // 2 + 1
    accepted = sum(
        chance * _at_least(need - c, n - c, miss)
        for c, chance in enumerate(drawn(n, collude + lazy, population))
    )
    # A lazy verifier never rejects, so the colluders and those who work need the majority without
    # it.
    among = min(1.0, lazy / (1 - collude)) if collude < 1 else 0.0
    others = None if population is None else population - round(collude * population)
    rejected = 0.0
    for c, chance in enumerate(drawn(n, collude, population)):
        if n > c and chance > 0:
            for idle, share in enumerate(drawn(n - c, among, others)):
                rejected += chance * share * _at_least(need - c, n - c - idle, alarm)
        elif chance > 0:
            rejected += chance
    return Odds(wrong_accepted=accepted, honest_rejected=rejected)


def drawn(n: int, share: float, population: int | None = None) -> list[float]:
    """Return P(c of n drawn peers belong to a group), c = 0..n: binomial, or hypergeometric if the
    ``population`` is finite.

    With a population the group has ``round(share * population)`` peers. Raises ValueError for an
    impossible draw.
    """
    if n < 1 or not 0 <= share <= 1:
        raise ValueError(
            f"a draw needs at least one verifier and a share from 0 to 1, got {n} and {share}"
        )
    if population is None:
        return [comb(n, c) * share**c * (1 - share) ** (n - c) for c in range(n + 1)]
    if population < n:
        raise ValueError(f"{n} verifiers cannot be drawn from {population}: take a smaller n")
    group = round(share * population)
    return [
        comb(group, c) * comb(population - group, n - c) / comb(population, n) for c in range(n + 1)
    ]


def _at_least(need: int, of: int, chance: float) -> float:
    """Return P(``need`` or more of ``of`` independent events happen)."""
    return sum(
        comb(of, k) * chance**k * (1 - chance) ** (of - k) for k in range(max(0, need), of + 1)
    )


def least_audit(gain: float, penalty: float, detected: float) -> float:
    """Return the share of claims to audit above which cheating does not pay: rate * P(detected) *
    penalty = gain; > 1: never.

    ``gain``, ``penalty``: per cheat, in the same unit.
    """
    if gain < 0 or penalty <= 0 or not 0 < detected <= 1:
        raise ValueError(
            "gain must not be negative, penalty must be positive, and detected in (0, 1]"
        )
    return gain / (penalty * detected)
