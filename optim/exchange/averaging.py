"""The mean of the contributions that a round counts, and which contributions are refused before.

    screen.problem(key, own, peer, theirs)       # before the commit: why it must not count, or None
    mean_of(screen, codec, me, 0, contributions) # after it

An exchange without a screen of its own accepts all finite contributions (``TRUSTING``). A node's
screens are in `shoal.swarm.exchange.robust`. How a robust mean becomes one of weights:
docs/internals.md, "Robust means".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor

from shoal.optim.codecs.base import Codec
from shoal.optim.codecs.mod4 import PairMessage, Reading
from shoal.optim.codecs.registry import sent_by_senders
from shoal.optim.exchange.base import Mean, RoundKey, counted_weights, held_at_once, weighted_mean

GRID = 2**20
"""Shares are whole multiples of 1 / GRID."""
SLAB = 2**18
"""Values of a contribution that are in float64 at a time."""
ITERATIONS = 30
"""Of a clipped mean: more change no share."""
CUTOFF = 1e4
"""In usual distances: a contribution beyond it has no share, because its square would drown the
others'.
"""

Tensors = Sequence[Tensor]
Contributions = Sequence[tuple[str, float, Iterable[Tensor]]]
"""(peer id, weight, float32 tensors) of each member."""


class UpdateScreen:
    """One node's check of others' contributions; this one accepts all.

    ``problem`` may be called from several threads at once.
    """

    gathers = False
    """True if every contribution is needed separately, so that an all-reduce will not do."""

    def problem(
        self,
        key: RoundKey,
        own: Callable[[], Sequence[Tensor]],
        peer: str,
        theirs: Sequence[Tensor],
    ) -> str | None:
        """Return in a few words why the contribution of ``peer`` must not count, or None if it may.

        ``own`` returns this node's.

        Neither is changed. Both are decoded, and ``theirs`` has the shapes of ``own``.
        """
        return None

    def mean(self, me: str, fragment: int, contributions: Contributions, even: int = 0) -> Mean:
        """Return the mean to use for a committed exchange of ``me`` and others (`weighted_mean`);
        may be computed in place.
        """
        return weighted_mean(contributions, even)


TRUSTING = UpdateScreen()


def norms(own: Tensors, other: Tensors) -> tuple[float, float]:
    """Return the Euclidean norms of the difference of all tensors together and of ``own``. float32
    input cannot overflow.
    """
    far = 0.0
    near = 0.0
    for mine, theirs in zip(own, other, strict=True):
        slabs = torch.split(mine.reshape(-1), SLAB)
        for a, b in zip(slabs, torch.split(theirs.reshape(-1), SLAB), strict=True):
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
        for start in range(0, like.numel(), SLAB):
            rows = torch.stack([part[start : start + SLAB].double() for part in flat])
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
        farthest = CUTOFF**2 * median(squares[start])
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


def mean_of(
    screen: UpdateScreen,
    codec: Codec,
    me: str,
    fragment: int,
    contributions: Contributions,
    even: int = 0,
) -> Mean:
    """Return the mean of a committed exchange, of the same bits for all members without a screen;
    may be computed in place.

    A codec that averages by sender takes the place of the screen's mean, and needs all decoded
    contributions at once.
    """
    if sent_by_senders(codec, ()) is None:
        return screen.mean(me, fragment, contributions, even)
    held = [(peer, weight, held_at_once(tensors)) for peer, weight, tensors in contributions]
    held.sort(key=lambda item: item[0])
    by_senders = sent_by_senders(codec, [tuple(tensor.shape) for tensor in held[0][2]]) or []
    others = [place for place, by_sender in enumerate(by_senders) if not by_sender]
    rest = weighted_mean(
        [(peer, weight, [tensors[place] for place in others]) for peer, weight, tensors in held]
    )
    stated, _ = counted_weights([weight for _, weight, _ in held])
    weights = []
    counted = []
    for weight, (_, _, tensors) in zip(stated, held, strict=True):
        if weight:
            weights.append(weight)
            counted.append(tensors)
    plain = iter(rest.tensors)
    means = []
    for place, by_sender in enumerate(by_senders):
        if by_sender:
            means.append(sender_mean(weights, [tensors[place] for tensors in counted]))
        else:
            means.append(next(plain))
    return replace(rest, tensors=means)


def pair_mean(
    screen: UpdateScreen,
    fragment: int,
    mine: tuple[str, float, PairMessage],
    theirs: tuple[str, float, Reading],
    refused: bytes,
    even: int = 0,
) -> Mean:
    """Return the mean of a committed exchange whose sides read each other by their own weights
    (`shoal.optim.codecs.mod4`).

    The mean is taken of what the partner sent less what this peer sent, and of nothing, and added
    to the own tensors: so the two sides move by opposite amounts. ``mine`` and ``theirs`` are peer
    id, weight and contribution; theirs is used up. ``refused``: the blocks that the partner refused
    (`Reading.bits`).
    """
    me, weight, message = mine
    peer, their_weight, read = theirs
    moves = message.move(read, refused)
    still = [torch.zeros_like(move) for move in moves]
    mean = screen.mean(me, fragment, [(me, weight, still), (peer, their_weight, moves)], even)
    own_tensors = zip(mean.tensors, message.tensors(), strict=True)
    return replace(mean, tensors=[move.add_(own) for move, own in own_tensors])


def sender_mean(weights: Sequence[float], tensors: Sequence[Tensor]) -> Tensor:
    """Return the mean that the production code of SparseLoCo's authors takes (tplr-ai/templar,
    compress.py), of one tensor.

        f_k = min(1, median of all norms / ||x_k||);   mean[i] = sum_k w_k f_k x_k[i] / sum of w_k
                                                       over the k that sent index i

    The median is torch's (the lower of two). Sent is what is not 0; what nobody sent is 0. Their
    code has no weights (w = 1). The paper (2508.15706) divides by the number of peers in place of
    that of the senders, so a step is up to that many times smaller.
    """
    lengths = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
    norms = torch.stack(lengths)
    factors = (norms.median() / norms.clamp_min(torch.finfo(torch.float64).tiny)).clamp_max(1.0)
    total = torch.zeros_like(tensors[0])
    share = torch.zeros_like(tensors[0])
    for weight, factor, tensor in zip(weights, factors.tolist(), tensors, strict=True):
        total.add_(tensor, alpha=weight * factor)
        share.add_(tensor != 0, alpha=weight)
    return total.div_(share.masked_fill_(share == 0, 1.0))
