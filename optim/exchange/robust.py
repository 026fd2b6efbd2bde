"""What a node makes of others' contributions: which it refuses before anything counts, and what it takes in place of the mean.

An exchange asks its ``UpdateScreen`` at two moments. Before the commit, ``problem``: whoever has one refuses that contribution, so
a pair goes apart and a group goes on without it, and nothing of it was ever used. After the commit, ``mean``. The defence of a node
is in `shoal.swarm.exchange.robust`; without one an exchange trusts everybody with finite numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Protocol

import torch
from torch import Tensor

from shoal.optim.exchange.base import Mean, RoundKey, weighted_mean

Contributions = Sequence[tuple[str, float, Iterable[Tensor]]]
"""(peer id, weight, float32 tensors) of each member."""


class UpdateScreen(Protocol):
    """One node's. ``problem`` may be called from several threads at once."""

    @property
    def gathers(self) -> bool:
        """Needs every contribution by itself, so that sums of parts (an all-reduce) are of no use."""
        ...

    def problem(self, key: RoundKey, own: Callable[[], Sequence[Tensor]], peer: str, theirs: Sequence[Tensor]) -> str | None:
        """Why the contribution of ``peer`` must not count, in a few words; None: it may. ``own`` gives this node's.

        Neither is changed. Both are as the codec delivered them, and ``theirs`` has the shapes of ``own``.
        """
        ...

    def mean(self, me: str, fragment: int, contributions: Contributions) -> Mean:
        """What to take for the mean of a committed exchange, the own contribution ``me`` among them; may be computed in place."""
        ...


class Trusting:
    """Everybody counts as it says."""

    gathers = False

    def problem(self, key: RoundKey, own: Callable[[], Sequence[Tensor]], peer: str, theirs: Sequence[Tensor]) -> str | None:
        """None."""
        return None

    def mean(self, me: str, fragment: int, contributions: Contributions) -> Mean:
        """The weighted mean."""
        return weighted_mean(contributions)


TRUSTING = Trusting()


Tensors = Sequence[Tensor]


GRID = 2**20


SLAB = 2**18  # values of a contribution in float64 at a time


ITERATIONS = 30


NOTHING = 1e4  # times the usual distance: what is farther has no share, for its square would drown the others'


def norms(own: Tensors, other: Tensors) -> tuple[float, float]:
    """The Euclidean norm of the difference of all tensors together, and that of ``own``. float32 input cannot overflow."""
    far = near = 0.0
    for mine, theirs in zip(own, other, strict=True):
        for a, b in zip(torch.split(mine.reshape(-1), SLAB), torch.split(theirs.reshape(-1), SLAB), strict=True):
            exact = a.double()
            near += float(exact.dot(exact))
            far += float(exact.sub_(b).square_().sum())
    return math.sqrt(far), math.sqrt(near)


def squared_distances(contributions: Sequence[Tensors]) -> list[list[float]]:
    """Between each two contributions, n x n, never negative and 0 on the diagonal."""
    first, count = contributions[0], len(contributions)
    gram = torch.zeros(count, count, dtype=torch.float64)
    for place, like in enumerate(first):
        flat = [tensors[place].reshape(-1) for tensors in contributions]
        for start in range(0, like.numel(), SLAB):
            rows = torch.stack([part[start : start + SLAB].double() for part in flat])
            rows -= rows.median(dim=0).values  # weights differ by little: squares of the whole would drown that
            gram += rows @ rows.T
    squares = gram.diagonal()[:, None] + gram.diagonal()[None, :] - 2 * gram
    found: list[list[float]] = squares.clamp_min(0).fill_diagonal_(0).tolist()
    return found


def clipped_gossip(distance: float, radius: float) -> int:
    """The other's share in x + (clip(y - x, radius)) / 2, of ``GRID``: half of it within the radius, less beyond.

    The result is at most ``radius / 2`` away from x (share rounded down). ValueError for a radius below 0.
    """
    if not radius >= 0:
        raise ValueError(f"a radius must not be negative, got {radius}")
    return GRID // 2 if distance <= radius else int(GRID // 2 * (radius / distance))


def centered_clip(squares: Sequence[Sequence[float]], times: float) -> list[int]:
    """The shares, in all about ``GRID``, in the v to which v <- v + (1/n) sum_j clip(x_j - v, radius) comes.

    Ours, where the paper goes on from the previous aggregate with a given radius: it starts at the contribution with the least
    median distance to the others, and the radius is ``times`` the median distance from v, anew in each iteration. So it needs no
    memory, and no setting in the unit of the model. With a quarter hostile it stays within twice the largest distance of an honest
    contribution from the honest mean (tests/verification/test_shares.py). Equal shares (1 each) if nothing is clipped in the end.

    Args:
        squares: squared distances between each two of n contributions.
        times: positive; infinity clips nothing.
    """
    if not squares or not times > 0:
        raise ValueError("a clipped mean needs a contribution and a radius above 0")
    count = len(squares)
    start = min(range(count), key=lambda place: (median(squares[place]), place))
    if math.isfinite(times):
        near = [place for place in range(count) if squares[start][place] <= NOTHING**2 * median(squares[start])]
        if len(near) < count:
            among = dict(zip(near, centered_clip([[squares[i][j] for j in near] for i in near], times), strict=True))
            return [among.get(place, 0) for place in range(count)]
    exact = torch.tensor(squares, dtype=torch.float64)
    shares = torch.zeros(count, dtype=torch.float64)
    shares[start] = 1.0
    factors = torch.zeros(count, dtype=torch.float64)
    for _ in range(ITERATIONS):
        # |x_j - sum_k c_k x_k|^2, for shares that sum to 1
        from_v = (exact @ shares - 0.5 * shares @ exact @ shares).clamp_min(0).sqrt()
        radius = math.inf if math.isinf(times) else times * median(from_v.tolist())
        factors = torch.where(from_v <= radius, 1.0, radius / from_v)
        shares = shares * (1 - factors.mean()) + factors / count
    if bool((factors == 1).all()):
        return [1] * count
    return [int(share) for share in (shares * GRID).round().tolist()]
