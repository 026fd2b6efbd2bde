"""How sure a measured rate is: the exact confidence interval of a count."""

from __future__ import annotations

import math
from collections.abc import Callable


def rate_interval(found: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """The exact interval (Clopper and Pearson 1934) of a rate of which ``found`` of ``total`` cases were seen.

    Raises ``ValueError`` unless 0 <= found <= total, total >= 1 and 0 < confidence < 1.
    """
    if not 0 <= found <= total or total < 1 or not 0 < confidence < 1:
        raise ValueError(f"{found} of {total} at {confidence} is not a count with a confidence")
    tail = (1 - confidence) / 2
    low = 0.0 if found == 0 else _solve(lambda rate: 1 - _at_most(found - 1, total, rate), tail, rising=True)
    high = 1.0 if found == total else _solve(lambda rate: _at_most(found, total, rate), tail, rising=False)
    return low, high


def _at_most(most: int, total: int, rate: float) -> float:
    """P(Binomial(total, rate) <= most), for 0 < rate < 1."""
    log_yes, log_no = math.log(rate), math.log1p(-rate)
    fixed = math.lgamma(total + 1)
    ways = (fixed - math.lgamma(k + 1) - math.lgamma(total - k + 1) for k in range(most + 1))
    return math.fsum(math.exp(way + k * log_yes + (total - k) * log_no) for k, way in enumerate(ways))


def _solve(chance: Callable[[float], float], target: float, rising: bool) -> float:
    """Where ``chance``, monotone on (0, 1), is ``target``, by bisection to the last bit."""
    low, high = 0.0, 1.0
    while True:
        middle = (low + high) / 2
        if middle in (low, high):
            return middle
        if (chance(middle) < target) == rising:
            low = middle
        else:
            high = middle
