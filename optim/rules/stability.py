"""Convergence of the outer step: the eigenvalues of the outer recursion on a quadratic, for warnings.

Where the inner steps of a round contract a direction by 1 - c (0 < c <= 1; c near 1 for long rounds), its pseudo-gradient is c
times the slow weight. A mean that is applied L rounds late then gives, with x = lr c and momentum m, a linear recursion whose roots
are those of

    nesterov    z^(L+2) - (1+m) z^(L+1) + m z^L + x ((1+m) z - m) f(z)
    heavy ball  z^(L+2) - (1+m) z^(L+1) + m z^L + x z f(z)

with f(z) = 1, or f(z) = 1 - s + s z^L if a part s of the displacement is applied at once (eager updates). It is stable while all
roots lie inside the unit circle. AdamW's steps are not linear, so this is a guide, not a proof.
"""

from __future__ import annotations

import functools
import warnings

import torch


def largest_root(rate: float, momentum: float, lag: int, *, nesterov: bool, fresh: float = 0.0) -> float:
    """Return the largest absolute value of the roots for x = ``rate`` and a delay of ``lag`` rounds."""
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


@functools.lru_cache(maxsize=256)
def limit(momentum: float, lag: int, *, nesterov: bool, fresh: float = 0.0) -> float:
    """Return the largest stable lr for c = 1 (four digits); above it the recursion diverges. 0 if momentum is 1."""
    if momentum >= 1 and (lag > 0 or nesterov):
        return 0.0
    if lag == 0:
        return 2 * (1 + momentum) / (1 + 2 * momentum) if nesterov else 2 * (1 + momentum)

    def stable(rate: float) -> bool:
        return largest_root(rate, momentum, lag, nesterov=nesterov, fresh=fresh) < 1

    step = 0.01 * (1 - momentum)
    rate = step
    while stable(rate):
        rate += step
    low, high = rate - step, rate
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if stable(middle) else (low, middle)
    return low


def warn_if_unstable(lr: float, momentum: float, lag: int, *, nesterov: bool, fresh: float = 0.0, stacklevel: int = 3) -> None:
    """Warn, naming the knob to change, if ``lr`` is at or above the ``limit`` (lr 0 never is)."""
    largest = limit(momentum, lag, nesterov=nesterov, fresh=fresh)
    if lr >= largest and lr > 0:
        late = "" if lag == 0 else f" and a mean that comes {lag} round{'s' * (lag > 1)} late"
        mend = f"keep lr below {largest:.3g} or lower the momentum" if largest > 0 else "lower the momentum"
        warnings.warn(
            f"outer lr {lr:g} with momentum {momentum:g}{late} may diverge where the inner steps have converged: {mend}",
            stacklevel=stacklevel,
        )
