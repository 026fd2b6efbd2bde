"""Points as a polynomial modulo a prime: what is looked up may be found without being listed (TOPLOC, 2501.16007, section 4).

K points (x, y) are the values of one polynomial of degree K - 1 over the integers modulo 65,497, so K coefficients of 16 bits hold
them all, without the x. Whoever knows an x evaluates the polynomial there and gets its y; at any other x it gets noise.

The interpolation is Lagrange's, written with power sums so that it is a few products for many windows at once. With
M(x) = prod (x - x_i) = sum_j m_j x^j, w_i = y_i / M'(x_i) and S_t = sum_i w_i x_i^t, the coefficients are
c_l = sum_{j > l} m_j S_{j-1-l}. Everything is float64, exactly: factors are below 2^16, and sums of at most 1,024 of their
products below 2^42. Of powers only two short ladders are made (Paterson and Stockmeyer 1973): all of them would be 128 KB a window.
"""

from __future__ import annotations

import math
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
    master = _product_of_roots(places)  # (W, K), constant first, without the leading 1
    slope = torch.nn.functional.pad(master[:, 1:], (0, 1), value=1.0).mul_(torch.arange(1, count + 1, dtype=torch.float64))
    small, large = _ladders(places, count)
    at_roots = _at(_reduced(slope), small, large).long()  # of M', (W, K)
    if bool((at_roots == 0).any()):
        raise ValueError("two points of one polynomial have the same x")
    weights = _reduced(y.double() * _inverses()[at_roots])  # w_i, (W, K)
    sums = _reduced(_reduced(large * weights.unsqueeze(2)).mT @ small).flatten(1)[:, :count]  # S_t, (W, K)
    # In each term of c_l the index of m is larger by l + 1: terms of one product, once the sums are turned round.
    turned = sums.flip(1)
    return _reduced(_product(master, turned)[:, count:] + turned).long()  # the last is for m_K, which is 1


def evaluate(coefficients: Tensor, x: Tensor) -> Tensor:
    """Values (W, P) int64 of the polynomials ``coefficients`` (W, K) at ``x`` (W, P) int64, both in [0, ``PRIME``)."""
    _check_range(coefficients, "coefficients")
    _check_range(x, "x")
    small, large = _ladders(x.double(), coefficients.shape[1])
    return _at(coefficients.double(), small, large).long()


def _check_range(values: Tensor, name: str) -> None:
    if values.is_floating_point() or (values.numel() and not 0 <= int(values.min()) <= int(values.max()) < PRIME):
        raise ValueError(f"{name} must be whole numbers from 0 to {PRIME - 1}")


def _reduced(values: Tensor) -> Tensor:
    """``values`` modulo the prime, in place, for float64 whole numbers in [0, 2^43): faster than torch's remainder.

    A quotient is rounded at 2^-26 of a unit there, and is at least 1 / ``PRIME`` below the next whole number: its floor is right.
    """
    quotients = values / PRIME
    return values.sub_(quotients.floor_().mul_(PRIME))


def _powers(x: Tensor, count: int) -> Tensor:
    """x^0 ... x^(count-1) modulo the prime, (W, P) to (W, P, count), by doubling."""
    powers = torch.empty((*x.shape, count), dtype=torch.float64)
    powers[:, :, 0] = 1
    step, done = x.unsqueeze(2), 1  # step: x^done
    while done < count:
        more = min(done, count - done)
        powers[:, :, done : done + more] = _reduced(powers[:, :, :more] * step)
        step, done = _reduced(step * step), done + more
    return powers


def _ladders(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Of ``x`` (W, P) the powers below a, (W, P, a), and every a-th one, (W, P, b): b a >= ``count``, each about its root.

    Products of the two are all powers below ``count``, which need not be stored.
    """
    rungs = math.isqrt(count - 1) + 1
    small = _powers(x, rungs)
    return small, _powers(_reduced(small[:, :, -1] * x), -(-count // rungs))


def _at(coefficients: Tensor, small: Tensor, large: Tensor) -> Tensor:
    """Values (W, P) of the polynomials ``coefficients`` (W, K) at the points of these ladders."""
    rungs, steps = small.shape[2], large.shape[2]
    padded = torch.nn.functional.pad(coefficients, (0, rungs * steps - coefficients.shape[1]))
    parts = _reduced(small @ padded.view(-1, steps, rungs).mT)  # (W, P, steps)
    return _reduced(parts.mul_(large).sum(dim=2))


def _product(left: Tensor, right: Tensor) -> Tensor:
    """The product of polynomials (..., n) as (..., 2 n), the last one 0, by FFT. Not reduced.

    Exact for whole numbers in [0, ``PRIME``) and n <= 1,024: sums below 2^42 have errors of about 2^-8 in float64.
    """
    size = 2 * left.shape[-1]
    made: Tensor = torch.fft.irfft(torch.fft.rfft(left, size) * torch.fft.rfft(right, size), size)
    return made.round_()


def _product_of_roots(x: Tensor) -> Tensor:
    """Coefficients of prod (t - x_i), (W, K) to (W, K), without the leading 1, multiplying neighbours until one is left."""
    count = x.shape[1]
    factors = (-x).add_(PRIME).unsqueeze(2)  # (W, K, 1)
    # Factors of t in front make their number a power of two; they move all coefficients up, and are taken away in the end.
    missing = (1 << (count - 1).bit_length()) - count
    factors = _reduced(torch.nn.functional.pad(factors, (0, 0, 0, missing)))
    while factors.shape[1] > 1:
        left, right = factors[:, 0::2], factors[:, 1::2]
        factors = _product(left, right)
        factors[:, :, left.shape[2] :].add_(left).add_(right)  # the leading 1 of each times the other
        factors = _reduced(factors)
    return factors[:, 0, missing:]


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
