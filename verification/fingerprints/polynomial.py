"""Points as a polynomial modulo a prime, which can be looked up without listing their x (TOPLOC,
2501.16007, section 4).

    coefficients = interpolate(x, y)           # K points: K coefficients of 16 bits, without the x
    evaluate(coefficients, x)                  # y; at any other x noise

With M(x) = prod (x - x_i) and w_i = y_i / M'(x_i), Lagrange's interpolation is the sum over i of
w_i M(x) / (x - x_i), and Horner's rule at x_i divides M by (x - x_i) and ends in M'(x_i).
Everything is float64, exactly: factors are below 2^16, and sums of at most 1,024 of their products
below 2^42.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

PRIME = 65497
"""The modulus of coefficients: TOPLOC's, below 2^16."""
SMALLEST_MODULUS = 2**15
"""Of places, at least: a smaller one would let two windows look alike."""
MOST_POINTS = 1024
"""Points of a polynomial, at most: sums of so many products are exact in float64."""


Floats = npt.NDArray[np.float64]
"""Here in numpy: the arrays are small, and each of its calls costs a third of one of torch's."""


def injective_modulus(indices: Tensor) -> int:
    """Return the largest number up to ``PRIME`` modulo which the ``indices`` (K,) int64 are all
    different.

    Raises ``ValueError`` if there is none above 32,768; with 128 of 262,144 places it is the first
    or second nearly always.
    """
    for modulus in range(PRIME, SMALLEST_MODULUS, -1):
        if len(set((indices % modulus).tolist())) == len(indices):
            return modulus
    raise ValueError("no modulus keeps the indices apart: are there duplicates among them?")


def interpolate(x: Tensor, y: Tensor) -> Tensor:
    """Return the coefficients (W, K) int64, constant first, of polynomials through ``x``, ``y`` (W,
    K) int64 in [0, ``PRIME``).

    All x of one row must differ. Raises ``ValueError`` on other shapes, values out of range, or
    equal x.
    """
    if x.shape != y.shape or x.dim() != 2 or not 0 < x.shape[1] <= MOST_POINTS:
        raise ValueError(
            f"x and y must be equally many rows of 1 to {MOST_POINTS} points, not {tuple(x.shape)} "
            f"and {tuple(y.shape)}"
        )
    _check_range(x, "x")
    _check_range(y, "y")
    places = _floats(x)
    count = x.shape[1]
    master = np.zeros((len(places), count + 1))  # M's coefficients, highest first
    master[:, 0] = 1
    for root in range(count):
        shifted = (PRIME - places[:, root : root + 1]) * master[:, : root + 1]
        master[:, 1 : root + 2] = _reduced(master[:, 1 : root + 2] + shifted)
    quotients = np.ones((count, *places.shape))  # (power from the highest, W, root)
    slope = np.ones_like(places)  # M' at each root
    for power in range(1, count):
        quotients[power] = _reduced(master[:, power : power + 1] + places * quotients[power - 1])
        slope = _reduced(slope * places + quotients[power])
    if not slope.all():
        raise ValueError("two points of one polynomial have the same x")
    inverse = np.array([pow(int(value), -1, PRIME) for value in slope.flat]).reshape(slope.shape)
    found = np.einsum("wi,jwi->wj", _reduced(_floats(y) * inverse), quotients)
    return torch.from_numpy(_reduced(found)[:, ::-1].astype(np.int64))


def evaluate(coefficients: Tensor, x: Tensor) -> Tensor:
    """Return the values (W, P) int64 of the polynomials ``coefficients`` (W, K) at ``x`` (W, P)
    int64, both in [0, ``PRIME``).
    """
    _check_range(coefficients, "coefficients")
    _check_range(x, "x")
    places = _floats(x)
    found = np.zeros(tuple(x.shape))
    for column in _floats(coefficients).T[::-1]:
        found = _reduced(found * places + column[:, None])
    return torch.from_numpy(found.astype(np.int64))


def _check_range(values: Tensor, name: str) -> None:
    outside = values.numel() and not 0 <= int(values.min()) <= int(values.max()) < PRIME
    if values.is_floating_point() or outside:
        raise ValueError(f"{name} must be whole numbers from 0 to {PRIME - 1}")


def _floats(values: Tensor) -> Floats:
    return values.numpy(force=True).astype(np.float64)


def _reduced(values: Floats) -> Floats:
    """Reduce ``values`` modulo the prime, in place, for whole numbers in [0, 2^43): faster than the
    remainder.

    A quotient is rounded at 2^-26 of a unit there, and is at least 1 / ``PRIME`` below the next
    whole number: its floor is right.
    """
    quotients = values / PRIME
    np.floor(quotients, out=quotients)
    quotients *= PRIME
    values -= quotients
    return values
