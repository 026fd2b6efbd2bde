"""The weighted mean of contributions.

    weighted_mean([("a", 1.0, tensors_of_a), ("b", 2.0, tensors_of_b)]).tensors

Every member gets the same bits, in whatever order the contributions came in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median_low

import torch
from torch import Tensor

from shoal.optim.exchange.base import Mean
from shoal.optim.exchange.on_demand import OnDemand, slabs

MAX_MEDIANS = 4.0
"""Largest weight in a mean, in median weights of its members: a stated weight is a claim that
nobody checks.
"""


def counted_weights(stated: Sequence[float]) -> tuple[list[float], float]:
    """Return the weights that count in a mean of members that stated these, and the largest that
    any of them can have.

    That is ``MAX_MEDIANS`` times the median of those above 0, the lower of two, so in a pair that
    many times the smaller one. A minority can therefore state what it likes, and no pair is one
    peer's alone. It depends on what all members know, so they agree on it. If all are 0, all count
    as 1. ValueError unless every weight is finite and not negative.
    """
    if not stated or any(not 0 <= weight < math.inf for weight in stated):
        raise ValueError(f"weights must be finite and not negative, got {list(stated)}")
    positive = [weight for weight in stated if weight > 0]
    if not positive:
        return [1.0] * len(stated), MAX_MEDIANS
    limit = MAX_MEDIANS * median_low(positive)
    return [min(weight, limit) for weight in stated], limit


def weighted_mean(
    contributions: Sequence[tuple[str, float, Iterable[Tensor]]], unweighted_count: int = 0
) -> Mean:
    """Return the mean of (peer id, stated weight, tensors) by ``counted_weights``, and a plain one
    of the first ``unweighted_count`` tensors.

    It is computed in the tensors of the peer whose id sorts first. The order of additions depends
    only on the peer ids, so every member gets the same bits. With two equal weights each product is
    exact, and the result is the correctly rounded mean. A peer with weight 0 takes part but is not
    counted. ValueError as of ``counted_weights``.
    """
    ordered = sorted(contributions, key=lambda item: item[0])
    weights, limit = counted_weights([weight for _, weight, _ in ordered])
    counted = []
    spare: Iterable[Tensor] | None = None
    for (peer, _, tensors), weight in zip(ordered, weights, strict=True):
        if weight > 0:
            counted.append((peer, weight, tensors))
        elif spare is None:
            spare = tensors
    return Mean(
        tensors=combined(counted, unweighted_count, spare),
        weight=sum(weights),
        members=tuple(peer for peer, _, _ in ordered),
        counted=len(counted),
        limit=limit,
    )


def combined(
    contributions: Sequence[tuple[str, float, Iterable[Tensor]]],
    unweighted_count: int = 0,
    spare: Iterable[Tensor] | None = None,
) -> list[Tensor]:
    """Return the sum of the tensors, each times its positive weight's share of all, or the same
    share in the first ``unweighted_count``.

    It is computed in the tensors of one of them, or in ``spare``, other than ``OnDemand`` ones,
    which are only read.
    """
    ordered = sorted(contributions, key=lambda item: item[0])
    total = sum(weight for _, weight, _ in ordered)
    shares = [(1 / len(ordered), weight / total) for _, weight, _ in ordered]
    first = ordered[0][2]
    if isinstance(first, OnDemand):
        return _into_another(
            first, [tensors for _, _, tensors in ordered[1:]], shares, unweighted_count, spare
        )
    result: list[Tensor] = []
    for (_, _, tensors), share in zip(ordered, shares, strict=True):
        if not result:
            result = [
                tensor.mul_(share[place >= unweighted_count])
                for place, tensor in enumerate(tensors)
            ]
        elif isinstance(tensors, OnDemand):
            flat = [tensor.view(-1) for tensor in result]
            for place, start, stop in slabs(tensors):
                flat[place][start:stop].add_(
                    tensors.values(place, start, stop), alpha=share[place >= unweighted_count]
                )
        else:
            for place, (accumulated, tensor) in enumerate(zip(result, tensors, strict=True)):
                accumulated.add_(tensor, alpha=share[place >= unweighted_count])
    return result


def _into_another(
    first: OnDemand,
    others: Sequence[Iterable[Tensor]],
    shares: Sequence[Sequence[float]],
    unweighted_count: int,
    spare: Iterable[Tensor] | None,
) -> list[Tensor]:
    """Return the sum that begins with ``first``, in the same order of additions, piece by piece in
    the tensors of another.
    """
    rest = [tensors if isinstance(tensors, OnDemand) else list(tensors) for tensors in others]
    result: list[Tensor] = []
    for tensors in (*rest, spare):
        if tensors is not None and not isinstance(tensors, OnDemand):
            result = list(tensors)
            break
    else:
        result = [torch.empty(shape, device="cpu") for shape in first.shapes]
    flat: list[OnDemand | list[Tensor]] = []
    for tensors in rest:
        if isinstance(tensors, OnDemand):
            flat.append(tensors)
        else:
            flat.append([tensor.view(-1) for tensor in tensors])
    for place, start, stop in slabs(first):
        piece = first.values(place, start, stop) * shares[0][place >= unweighted_count]
        for tensors, share in zip(flat, shares[1:], strict=True):
            if isinstance(tensors, OnDemand):
                part = tensors.values(place, start, stop)
            else:
                part = tensors[place][start:stop]
            piece.add_(part, alpha=share[place >= unweighted_count])
        result[place].view(-1)[start:stop] = piece
    return result
