"""The share of each contribution in a robust mean, from the distances between them.

    centered_clip(squared_distances(contributions), times=2.0)     # in units of 1 / GRID

How a robust mean becomes one of weights: docs/internals.md, "Robust means".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor

GRID = 2**20
"""Shares are whole multiples of 1 / GRID."""
SLAB_VALUES = 2**18
"""Values of a contribution that are in float64 at a time."""
ITERATIONS = 30
"""Iterations of a clipped mean: more change no share."""
MAX_DISTANCE_IN_MEDIANS = 1e4
"""A contribution farther away has no share: its square would drown the others'."""
Tensors = Sequence[Tensor]


def norms(own: Tensors, other: Tensors) -> tuple[float, float]:
    """Return the Euclidean norms of the difference of all tensors together and of ``own``. float32
    input cannot overflow.
    """
    far = 0.0
    near = 0.0
    for mine, theirs in zip(own, other, strict=True):
        slabs = torch.split(mine.reshape(-1), SLAB_VALUES)
        for a, b in zip(slabs, torch.split(theirs.reshape(-1), SLAB_VALUES), strict=True):
            exact = a.double()
            near += float(exact.dot(exact))
            far += float(exact.sub_(b).square_().sum())
    return math.sqrt(far), math.sqrt(near)


def squared_distances(contributions: Sequence[Tensors]) -> list[list[float]]:
    """Return the squared distance between each two contributions, n x n, never negative and 0 on
    the diagonal.
    """
    first = contributions[0]
    count = len(contributions)
    gram = torch.zeros(count, count, dtype=torch.float64, device="cpu")
    for place, like in enumerate(first):
        flat = [tensors[place].reshape(-1) for tensors in contributions]
        for start in range(0, like.numel(), SLAB_VALUES):
            rows = torch.stack([part[start : start + SLAB_VALUES].double() for part in flat])
            # Model weights differ by little, which squares of the whole would drown.
            rows -= rows.median(dim=0).values
            gram += rows @ rows.T
    squares = gram.diagonal()[:, None] + gram.diagonal()[None, :] - 2 * gram
    found: list[list[float]] = squares.clamp_min(0).fill_diagonal_(0).tolist()
    return found


def clipped_gossip(distance: float, radius: float) -> int:
    """Return the share of y in x + clip(y - x, radius) / 2, of ``GRID``: half of it within the
    radius, less beyond.

    The result is at most ``radius / 2`` away from x (share rounded down). ValueError for a radius
    below 0.
    """
    if not radius >= 0:
        raise ValueError(f"a radius must not be negative, got {radius}")
    if distance <= radius:
        return GRID // 2
    return int(GRID // 2 * (radius / distance))


def centered_clip(squares: Sequence[Sequence[float]], times: float) -> list[int]:
    """Return the shares, in all about ``GRID``, in the limit v of CenteredClip (2012.10333,
    algorithm 2):

        v <- v + (1/n) sum_j clip(x_j - v, radius)

    It starts at the contribution with the least median distance to the others, with a radius of
    ``times`` the median distance from v, computed anew in each iteration: it needs no memory and no
    setting in the unit of the model. The shares are equal (1 each) if nothing is clipped in the
    end.

    Args:
        squares: squared distances between each two of n contributions.
        times: positive; infinity clips nothing.
    """
    if not squares or not times > 0:
        raise ValueError("a clipped mean needs a contribution and a radius above 0")
    count = len(squares)
    start = min(range(count), key=lambda place: (median(squares[place]), place))
    if math.isfinite(times):
        farthest = MAX_DISTANCE_IN_MEDIANS**2 * median(squares[start])
        near = [place for place in range(count) if squares[start][place] <= farthest]
        if len(near) < count:
            among = [[squares[i][j] for j in near] for i in near]
            shares_of_near = dict(zip(near, centered_clip(among, times), strict=True))
            return [shares_of_near.get(place, 0) for place in range(count)]
    exact = torch.tensor(squares, dtype=torch.float64, device="cpu")
    shares = torch.zeros(count, dtype=torch.float64, device="cpu")
    shares[start] = 1.0
    factors = torch.zeros(count, dtype=torch.float64, device="cpu")
    for _ in range(ITERATIONS):
        # |x_j - sum_k c_k x_k|^2, for shares that sum to 1
        from_v = (exact @ shares - 0.5 * shares @ exact @ shares).clamp_min(0).sqrt()
        radius = math.inf if math.isinf(times) else times * median(from_v.tolist())
        factors = torch.where(from_v <= radius, 1.0, radius / from_v)
        shares = shares * (1 - factors.mean()) + factors / count
    if bool((factors == 1).all()):
        return [1] * count
    return [int(share) for share in (shares * GRID).round().tolist()]
