"""The exact confidence interval of a measured rate."""

from __future__ import annotations


def rate_interval(found: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the interval of Clopper and Pearson (1934) for a rate when ``found`` of ``total``
    cases were seen.

    Raises ``ValueError`` unless 0 <= found <= total, total >= 1 and 0 < confidence < 1.
    """
    if not 0 <= found <= total or total < 1 or not 0 < confidence < 1:
        raise ValueError(f"{found} of {total} at {confidence} is not a count with a confidence")
    from scipy.stats import beta  # here, because it takes most of a second

    tail = (1 - confidence) / 2
    low = 0.0 if found == 0 else float(beta.ppf(tail, found, total - found + 1))
    high = 1.0 if found == total else float(beta.isf(tail, found + 1, total - found))
    return low, high
