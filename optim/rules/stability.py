"""Which outer rates are stable: warns of a rate that may diverge once the inner steps converge.

    limit(0.9, 0, nesterov=True)                     # 1.357: the largest stable lr
    warn_if_unstable(1.5, 0.9, 0, nesterov=True)     # a UserWarning: keep lr below 1.36 ...

The recursion behind it, on a quadratic, is in docs/internals.md, "Stability of the outer step".
"""

from __future__ import annotations

import functools
import warnings

import torch

SEARCH_STEP = 0.01
"""Step of the search for the limit, in units of 1 - momentum: well below every limit."""
BISECTIONS = 20
"""Halvings of that step: more digits than a warning shows."""


def warn_if_unstable(
    lr: float, momentum: float, lag: int, *, nesterov: bool, fresh: float = 0.0
) -> None:
    """Warn, naming the knob to change, if ``lr`` is at or above the ``limit`` (lr 0 never is)."""
    largest = limit(momentum, lag, nesterov=nesterov, fresh=fresh)
    if not (lr >= largest and lr > 0):
        return
    late = ""
    if lag > 0:
        late = f" and a mean that comes {lag} round{'s' if lag > 1 else ''} late"
    mend = "lower the momentum"
    if largest > 0:
        mend = f"keep lr below {largest:.3g} or lower the momentum"
    warnings.warn(
        f"outer lr {lr:g} with momentum {momentum:g}{late} may diverge where the inner steps "
        f"have converged: {mend}",
        stacklevel=3,
    )


@functools.lru_cache(maxsize=256)
def limit(momentum: float, lag: int, *, nesterov: bool, fresh: float = 0.0) -> float:
    """Return the largest stable lr (four digits) where a round ends at its optimum; above it the
    recursion diverges. 0 if momentum is 1.

    ``lag``: rounds by which the mean is late. ``fresh``: part of it that is applied at once.
    """
    if momentum >= 1 and (lag > 0 or nesterov):
        return 0.0
    if lag == 0 and nesterov:
        return 2 * (1 + momentum) / (1 + 2 * momentum)
    if lag == 0:
        return 2 * (1 + momentum)

    def stable(rate: float) -> bool:
        return largest_root(rate, momentum, lag, nesterov=nesterov, fresh=fresh) < 1

    step = SEARCH_STEP * (1 - momentum)
    high = step
    while stable(high):
        high += step
    low = high - step
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if stable(middle):
            low = middle
        else:
            high = middle
    return low


def largest_root(
    rate: float, momentum: float, lag: int, *, nesterov: bool, fresh: float = 0.0
) -> float:
    """Return the largest absolute value of the roots of the outer recursion: stable if below 1."""
    coefficients = torch.zeros(lag + 3, dtype=torch.float64, device="cpu")  # of z^0, z^1, ...
    coefficients[lag : lag + 3] = torch.tensor([momentum, -(1 + momentum), 1.0], device="cpu")
    direct = {0: -momentum, 1: 1 + momentum} if nesterov else {1: 1.0}
    for power, factor in direct.items():
        coefficients[power] += rate * factor * (1 - fresh)
        coefficients[power + lag] += rate * factor * fresh
    degree = lag + 2
    companion = torch.diag(torch.ones(degree - 1, dtype=torch.float64, device="cpu"), -1)
    companion[:, -1] = -coefficients[:degree]
    return float(torch.linalg.eigvals(companion).abs().max())
