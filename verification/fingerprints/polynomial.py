"""Points as a polynomial modulo a prime, which can be looked up without listing their x (TOPLOC, 2501.16007, section 4).

K points (x, y) are the values of one polynomial of degree K - 1 over the integers modulo 65,497, so K coefficients of 16 bits hold
them all, without the x. A verifier that knows an x evaluates the polynomial there and gets its y; at any other x it gets noise.

The interpolation is Lagrange's, written with power sums so that it is a few products for many windows at once. With
M(x) = prod (x - x_i) = sum_j m_j x^j, w_i = y_i / M'(x_i) and S_t = sum_i w_i x_i^t, the coefficients are
c_l = sum_{j > l} m_j S_{j-1-l}. Everything is float64, exactly: factors are below 2^16, and sums of at most 1,024 of their
products below 2^42. Of powers only two short ladders are made (Paterson and Stockmeyer 1973): all of them would be 128 KB a window.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

PRIME = 65497
SMALLEST_MODULUS = 2**15
MOST_POINTS = 1024
Floats = npt.NDArray[np.float64]
"""Here in numpy: the arrays are small, and each of its calls costs a third of one of torch's."""


def injective_modulus(indices: Tensor) -> int:
    """Return the largest number up to ``PRIME`` modulo which the ``indices`` (K,) int64 are all different.

    Raises ``ValueError`` if there is none above 32,768; with 128 of 262,144 places it is the first or second nearly always.
    """
    for modulus in range(PRIME, SMALLEST_MODULUS, -1):
        if len(set((indices % modulus).tolist())) == len(indices):
            return modulus
    raise ValueError("no modulus keeps the indices apart: are there duplicates among them?")


def interpolate(x: Tensor, y: Tensor) -> Tensor:
    """Return the coefficients (W, K) int64, constant first, of polynomials through ``x``, ``y`` (W, K) int64 in [0, ``PRIME``).

    All x of one row must differ. Raises ``ValueError`` on other shapes, values out of range, or equal x.
    """
    if x.shape != y.shape or x.dim() != 2 or not 0 < x.shape[1] <= MOST_POINTS:
        raise ValueError(
            f"x and y must be equally many rows of 1 to {MOST_POINTS} points, not {tuple(x.shape)} and {tuple(y.shape)}"
        )
    _check_range(x, "x")
    _check_range(y, "y")
    count = x.shape[1]
    places = _floats(x)
    master = _product_of_roots(places)  # (W, K), constant first, without the leading 1
    slope = np.ones_like(master)
    slope[:, :-1] = master[:, 1:]
    slope *= np.arange(1, count + 1)  # of M'
    ladders = _ladders(places, count)
    at_roots = _at(_reduced(slope), ladders).astype(np.int64)
    if not at_roots.all():
        raise ValueError("two points of one polynomial have the same x")
    weights = _reduced(_floats(y) * _inverses()[at_roots])  # w_i, (W, K)
    small, large = ladders
    sums = _reduced(_reduced(large * weights[:, None]) @ small.transpose(0, 2, 1)).reshape(len(x), -1)[:, :count]  # S_t
    # In each term of c_l the index of m is larger by l + 1: terms of one product, once the sums are turned round.
    turned = sums[:, ::-1]
    found = _product(master, turned)[:, count:] + turned  # the last is for m_K, which is 1
    return torch.from_numpy(_reduced(found).astype(np.int64))


def evaluate(coefficients: Tensor, x: Tensor) -> Tensor:
    """Return the values (W, P) int64 of the polynomials ``coefficients`` (W, K) at ``x`` (W, P) int64, both in [0, ``PRIME``)."""
    _check_range(coefficients, "coefficients")
    _check_range(x, "x")
    found = _at(_floats(coefficients), _ladders(_floats(x), coefficients.shape[1]))
    return torch.from_numpy(found.astype(np.int64))


def _check_range(values: Tensor, name: str) -> None:
    if values.is_floating_point() or (values.numel() and not 0 <= int(values.min()) <= int(values.max()) < PRIME):
        raise ValueError(f"{name} must be whole numbers from 0 to {PRIME - 1}")


def _floats(values: Tensor) -> Floats:
    return values.numpy(force=True).astype(np.float64)


def _reduced(values: Floats) -> Floats:
    """Reduce ``values`` modulo the prime, in place, for whole numbers in [0, 2^43): faster than the remainder.

    A quotient is rounded at 2^-26 of a unit there, and is at least 1 / ``PRIME`` below the next whole number: its floor is right.
    """
    quotients = values / PRIME
    np.floor(quotients, out=quotients)
    quotients *= PRIME
    values -= quotients
    return values


def _powers(x: Floats, count: int) -> Floats:
    """Compute x^0 ... x^(count-1) modulo the prime, (W, P) to (W, count, P), by doubling."""
    powers = np.ones((x.shape[0], count, x.shape[1]))
    step, done = x[:, None], 1  # step: x^done
    while done < count:
        more = min(done, count - done)
        powers[:, done : done + more] = _reduced(powers[:, :more] * step)
        step, done = _reduced(step * step), done + more
    return powers


def _ladders(x: Floats, count: int) -> tuple[Floats, Floats]:
    """Return the powers of ``x`` (W, P) below a, (W, a, P), and every a-th one, (W, b, P): a b >= ``count``, each about its root.

    Products of the two are all powers below ``count``, which need not be stored.
    """
    rungs = math.isqrt(count - 1) + 1
    small = _powers(x, rungs)
    return small, _powers(_reduced(small[:, -1] * x), -(-count // rungs))


def _at(coefficients: Floats, ladders: tuple[Floats, Floats]) -> Floats:
    """Return the values (W, P) of the polynomials ``coefficients`` (W, K) at the points of these ladders."""
    small, large = ladders
    rungs, steps = small.shape[1], large.shape[1]
    padded = np.zeros((len(coefficients), rungs * steps))
    padded[:, : coefficients.shape[1]] = coefficients
    parts = _reduced(padded.reshape(-1, steps, rungs) @ small)  # (W, steps, P)
    parts *= large
    return _reduced(parts.sum(axis=1))


def _product(left: Floats, right: Floats) -> Floats:
    """Multiply polynomials (..., n) to (..., 2 n), the last coefficient 0, by FFT. Not reduced.

    Exact for whole numbers in [0, ``PRIME``) and n <= 1,024: sums below 2^42 have errors of about 2^-8 in float64.
    """
    size = 2 * left.shape[-1]
    made: Floats = np.rint(np.fft.irfft(np.fft.rfft(left, size) * np.fft.rfft(right, size), size))
    return made


def _product_of_roots(x: Floats) -> Floats:
    """Return the coefficients of prod (t - x_i), (W, K) to (W, K), without the leading 1, by halving."""
    count = x.shape[1]
    # Factors of t make their number a power of two; they move all coefficients up, and are taken away in the end.
    missing = (1 << (count - 1).bit_length()) - count
    factors = np.zeros((len(x), 1, count + missing))  # (W, size, how many): long rows while factors are short
    factors[:, 0, :count] = _reduced(PRIME - x)
    while factors.shape[2] > 1 and factors.shape[1] <= 4:
        size, half = factors.shape[1], factors.shape[2] // 2
        left, right = factors[:, :, :half], factors[:, :, half:]
        made = np.zeros((len(x), 2 * size, half))
        for at in range(size):
            made[:, at : at + size] += left[:, at : at + 1] * right
        made[:, size:] += left  # the leading 1 of each times the other
        made[:, size:] += right
        factors = _reduced(made)
    factors = np.ascontiguousarray(factors.transpose(0, 2, 1))  # (W, how many, size)
    while factors.shape[1] > 1:
        size, half = factors.shape[2], factors.shape[1] // 2
        made = _product(factors[:, :half], factors[:, half:])
        made[:, :, size:] += factors[:, :half]
        made[:, :, size:] += factors[:, half:]
        factors = _reduced(made)
    return factors[:, 0, missing:]


@cache
def _inverses() -> Floats:
    """Return the inverse of every number modulo the prime, (PRIME,), by Fermat: a^(p-2). That of 0 is 0 and not used."""
    base = np.arange(PRIME, dtype=np.float64)
    inverse = np.ones_like(base)
    exponent = PRIME - 2
    while exponent:
        if exponent & 1:
            inverse = _reduced(inverse * base)
        base = _reduced(base * base)
        exponent >>= 1
    return inverse
