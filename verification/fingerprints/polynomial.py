"""Points as a polynomial modulo a prime: what is looked up may be found without being listed (TOPLOC, 2501.16007, section 4).

K points (x, y) are the values of one polynomial of degree K - 1 over the integers modulo 65,497, so K coefficients of 16 bits hold
them all, without the x. Whoever knows an x evaluates the polynomial there and gets its y; at any other x it gets noise.

The interpolation is Lagrange's, written with power sums so that it is a few matrix products for many windows at once. With
M(x) = prod (x - x_i) = sum_j m_j x^j, w_i = y_i / M'(x_i) and S_t = sum_i w_i x_i^t, the coefficients are
c_l = sum_{j > l} m_j S_{j-1-l}. Everything is float64, exactly: factors are below 2^16, and sums of at most
1,024 of their products below 2^42.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

PRIME = 65497
SMALLEST_MODULUS = 2**15
MOST_POINTS = 1024


def injective_modulus(indices: Tensor) -> int:
    """The largest number up to ``PRIME`` modulo which the ``indices`` (K,) int64 are all different.

    Raises ``ValueError`` if there is none above 32,768; with 128 of 262,144 places it is the first or second nearly always.
    """
    for modulus in range(PRIME, SMALLEST_MODULUS, -1):
        if len(torch.unique(indices % modulus)) == len(indices):
            return modulus
    raise ValueError("no modulus keeps the indices apart: are there duplicates among them?")


def interpolate(x: Tensor, y: Tensor) -> Tensor:
    """Coefficients (W, K) int64, the constant one first, of the polynomials through ``x``, ``y`` (W, K) int64 in [0, ``PRIME``).

    Of one row all x must differ. Raises ``ValueError`` on other shapes, values out of range, or equal x.
    """
    if x.shape != y.shape or x.dim() != 2 or not 0 < x.shape[1] <= MOST_POINTS:
        raise ValueError(
            f"x and y must be equally many rows of 1 to {MOST_POINTS} points, not {tuple(x.shape)} and {tuple(y.shape)}"
        )
    _check_range(x, "x")
    _check_range(y, "y")
    count = x.shape[1]
    places = x.double()
    master = _product_of_roots(places)  # (W, K + 1), constant first
    powers = _powers(places, count)  # (W, K, K): [w, i, t] = x_i^t
    slope = master[:, 1:] * torch.arange(1, count + 1, dtype=torch.float64) % PRIME  # of M, (W, K)
    at_roots = (powers @ slope.unsqueeze(2)).squeeze(2) % PRIME
    if bool((at_roots == 0).any()):
        raise ValueError("two points of one polynomial have the same x")
    weights = y.double() * _inverses()[at_roots.long()] % PRIME  # w_i, (W, K)
    sums = (weights.unsqueeze(1) @ powers).squeeze(1) % PRIME  # S_t, (W, K)
    # Row l of the Hankel matrix is m_{l+1}, m_{l+2}, ...; beyond m_K there is nothing.
    hankel = torch.nn.functional.pad(master[:, 1:], (0, count - 1)).unfold(1, count, 1)  # (W, K, K)
    return ((hankel @ sums.unsqueeze(2)).squeeze(2) % PRIME).long()


def evaluate(coefficients: Tensor, x: Tensor) -> Tensor:
    """Values (W, P) int64 of the polynomials ``coefficients`` (W, K) at ``x`` (W, P) int64, both in [0, ``PRIME``)."""
    _check_range(coefficients, "coefficients")
    _check_range(x, "x")
    powers = _powers(x.double(), coefficients.shape[1])
    return ((powers @ coefficients.double().unsqueeze(2)).squeeze(2) % PRIME).long()


def _check_range(values: Tensor, name: str) -> None:
    if values.is_floating_point() or (values.numel() and not 0 <= int(values.min()) <= int(values.max()) < PRIME):
        raise ValueError(f"{name} must be whole numbers from 0 to {PRIME - 1}")


def _powers(x: Tensor, count: int) -> Tensor:
    """x^0 ... x^(count-1) modulo the prime, (W, P) to (W, P, count), by doubling."""
    powers = torch.ones((*x.shape, 1), dtype=torch.float64)
    step = x.unsqueeze(2)  # x^(number of powers so far)
    while powers.shape[2] < count:
        powers = torch.cat((powers, powers * step % PRIME), dim=2)
        step = step * step % PRIME
    return powers[:, :, :count]


def _product_of_roots(x: Tensor) -> Tensor:
    """Coefficients of prod (t - x_i), (W, K) to (W, K + 1), multiplying neighbours until one is left."""
    count = x.shape[1]
    factors = torch.stack((-x % PRIME, torch.ones_like(x)), dim=2)  # (W, K, 2)
    while factors.shape[1] > 1:
        windows, many, size = factors.shape
        if many % 2:
            one = torch.zeros((windows, 1, size), dtype=torch.float64)
            one[:, :, 0] = 1
            factors = torch.cat((factors, one), dim=1)
        left, right = factors[:, 0::2], factors[:, 1::2]
        shifted = torch.nn.functional.pad(right, (size - 1, size - 1)).unfold(2, size, 1)  # (W, ., 2 size - 1, size)
        factors = (shifted @ left.flip(2).unsqueeze(3)).squeeze(3) % PRIME
    return factors[:, 0, : count + 1]


@cache
def _inverses() -> Tensor:
    """The inverse of every number modulo the prime, (PRIME,) float64, by Fermat: a^(p-2). That of 0 is 0 and is not asked for."""
    base = torch.arange(PRIME, dtype=torch.float64)
    inverse = torch.ones_like(base)
    exponent = PRIME - 2
    while exponent:
        if exponent & 1:
            inverse = inverse * base % PRIME
        base = base * base % PRIME
        exponent >>= 1
    return inverse
