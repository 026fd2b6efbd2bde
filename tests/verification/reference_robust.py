"""Means that a minority of hostile peers cannot move far: ClippedGossip for pairs and neighbourhoods, CenteredClip for groups.

ClippedGossip: He, Karimireddy, Jaggi, "Byzantine-robust decentralized learning via ClippedGossip", 2022. CenteredClip:
Karimireddy, He, Jaggi, "Learning from history for Byzantine robust optimization", 2021; used by BTARD (Gorbunov et al., 2021).

Tensors of one peer are clipped together, by the norm of all of them, so that the clipped difference keeps its direction. Norms are
computed in float64, results have the dtype of the own tensors, and nothing is changed in place. ValueError for shapes or dtypes
that differ, for numbers that are not finite, and for integers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

from torch import Tensor

Tensors = Sequence[Tensor]


def check(own: Tensors, other: Tensors) -> None:
    """Raises ValueError unless ``other`` is as many finite floating tensors of the same shapes and dtypes as ``own``."""
    if len(own) != len(other):
        raise ValueError(f"expected {len(own)} tensors, got {len(other)}")
    for mine, theirs in zip(own, other, strict=True):
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype or not mine.is_floating_point():
            raise ValueError(f"expected a floating {tuple(mine.shape)} {mine.dtype}, got {tuple(theirs.shape)} {theirs.dtype}")
        if not bool(theirs.isfinite().all()):
            raise ValueError("a tensor holds a number that is not finite")


def distance(a: Tensors, b: Tensors) -> float:
    """Euclidean norm of the difference of all tensors together, in float64; scaled, so that finite input gives no overflow."""
    largest = max((float((x.double() - y.double()).abs().max()) for x, y in zip(a, b, strict=True) if x.numel()), default=0.0)
    if largest == 0.0:
        return 0.0
    return largest * math.sqrt(sum(float(((x.double() - y.double()) / largest).square().sum()) for x, y in zip(a, b, strict=True)))


def factor(norm: float, radius: float) -> float:
    """By what a difference of this norm is multiplied to lie within ``radius``: min(1, radius / norm)."""
    if not radius >= 0:
        raise ValueError(f"a radius must not be negative, got {radius}")
    return 1.0 if norm <= radius else radius / norm


def clipped_gossip(own: Tensors, others: Sequence[Tensors], weights: Sequence[float], radius: float) -> list[Tensor]:
    """x + sum_j w_j clip(x_j - x, radius): each other peer moves the own tensors by at most ``weights[j] * radius``.

    With one partner, weight 1/2 and a large radius it is the mean. ``weights``: not negative, in all at most 1.
    """
    if len(weights) != len(others) or min(weights, default=0.0) < 0 or sum(weights) > 1 + 1e-9:
        raise ValueError("every other peer needs a weight that is not negative, in all at most 1")
    for other in others:
        check(own, other)
    return _moved(own, others, [w * factor(distance(own, other), radius) for w, other in zip(weights, others, strict=True)])


def centered_clip(contributions: Sequence[Tensors], start: Tensors, radius: float, iterations: int = 3) -> list[Tensor]:
    """v <- v + (1/n) sum_j clip(x_j - v, radius), ``iterations`` times from ``start``, the previous aggregate.

    With a large radius it is the mean. A hostile contribution moves the result by at most ``iterations * radius / n``.
    """
    if not contributions or iterations < 1:
        raise ValueError("a clipped mean needs a contribution and an iteration at least")
    for contribution in contributions:
        check(start, contribution)
    share, centre = 1 / len(contributions), [tensor.double() for tensor in start]
    for _ in range(iterations):
        centre = _moved(centre, contributions, [share * factor(distance(centre, other), radius) for other in contributions])
    return [tensor.to(like.dtype) for tensor, like in zip(centre, start, strict=True)]


def _moved(own: Tensors, others: Sequence[Tensors], steps: Sequence[float]) -> list[Tensor]:
    """own + sum_j steps[j] (others[j] - own), summed in float64."""
    moved = []
    for place, mine in enumerate(own):
        total = mine.double().clone()
        for other, step in zip(others, steps, strict=True):
            total += step * (other[place].double() - mine.double())
        moved.append(total.to(mine.dtype))
    return moved


class Radius:
    """A radius from the distances seen: ``times`` the median of the last ``window`` of them that were not refused.

    A distance beyond the radius is counted as the radius itself, so a peer that sends giants cannot widen it at once, and honest
    peers whose distances grow can, slowly. Until ``least`` distances are known the radius is infinite, since nothing is known.
    """

    def __init__(self, times: float = 3.0, window: int = 32, least: int = 4) -> None:
        if times < 1 or not 1 <= least <= window:
            raise ValueError("times must be at least 1, and least from 1 to window")
        self._times, self._least = times, least
        self._seen: deque[float] = deque(maxlen=window)

    @property
    def value(self) -> float:
        """In the unit of the distances."""
        return self._times * median(self._seen) if len(self._seen) >= self._least else math.inf

    def add(self, distance: float) -> bool:
        """Take note of a distance; whether it was within the radius. Raises ValueError if it is negative or not finite."""
        if not (distance >= 0 and math.isfinite(distance)):
            raise ValueError(f"a distance must be finite and not negative, got {distance}")
        radius = self.value
        self._seen.append(min(distance, radius))
        return distance <= radius

    def state_dict(self) -> dict[str, list[float]]:
        """What a checkpoint keeps."""
        return {"seen": list(self._seen)}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        """Go on from ``state_dict``. Raises ValueError for a distance that is negative or not finite."""
        if any(not (seen >= 0 and math.isfinite(seen)) for seen in state["seen"]):
            raise ValueError("a saved distance must be finite and not negative")
        self._seen = deque(state["seen"], maxlen=self._seen.maxlen)


def is_no_worse(before: float, after: float, tolerance: float) -> bool:
    """The acceptance test: the own held-out loss is finite after the mean, and at most ``tolerance`` above the one before."""
    return math.isfinite(after) and after <= before + tolerance
