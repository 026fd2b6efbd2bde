"""Curves of bounded length, and charts in which many of them are drawn together."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

MAX_POINTS = 512  # of each curve; a curve that is full keeps every other point
SMOOTHED = 1 / 32  # part of a curve over which it is smoothed
GAP = 6  # times the usual step of a curve, or of the chart: a longer one is a gap
DIGITS = 5  # significant ones in a chart

Points = Sequence[tuple[float, float]]


class Curve:
    """Points (x, y) by growing x, at most `MAX_POINTS`: when full, every other one goes, so the
    whole run stays in view.
    """

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []
        self._smooth: list[tuple[float, float]] | None = None
        self._every = 1
        self._skipped = 0

    def add(self, x: float, y: float) -> None:
        """Append a point; one with no larger x takes the place of all from there on (a node that
        resumed from a checkpoint).
        """
        self._smooth = None
        if self.points and x <= self.points[-1][0]:
            self.points = [point for point in self.points if point[0] < x]
        self._skipped += 1
        if self._skipped < self._every:
            return
        self._skipped = 0
        self.points.append((x, y))
        if len(self.points) > MAX_POINTS:
            self.points = self.points[::2]
            self._every *= 2

    def smooth(self) -> list[tuple[float, float]]:
        """Return the points with each y the exponential mean over about `SMOOTHED` of the curve;
        made anew only after `add`.
        """
        if self._smooth is None:
            share = 1 / max(len(self.points) * SMOOTHED, 1)
            found: list[tuple[float, float]] = []
            for x, y in self.points:
                found.append((x, found[-1][1] + (y - found[-1][1]) * share if found else y))
            self._smooth = found
        return self._smooth


def rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def grid(curves: Sequence[Points], size: int) -> list[float]:
    """Return at most ``size`` growing x at which curves are drawn together: their own, or equal
    steps where there are more.
    """
    found = sorted({x for points in curves for x, _ in points})
    if len(found) <= size:
        return found
    step = (found[-1] - found[0]) / (size - 1)
    return [found[0] + step * index for index in range(size)]


def laid(points: Points, xs: Sequence[float]) -> list[float | None]:
    """Return the y of a curve at each of ``xs``, straight between its points; None where no point
    is near.

    Behind its last point it stays as it was for a moment: others may have reported first.
    """
    steps = sorted(after - before for (before, _), (after, _) in pairwise(points))
    grid_step = (xs[-1] - xs[0]) / max(len(xs) - 1, 1) if xs else 0.0
    gap = GAP * max(steps[len(steps) // 2] if steps else 0.0, grid_step)
    found: list[float | None] = []
    for x in xs:
        at = bisect_left(points, x, key=lambda point: point[0])
        if at < len(points) and points[at][0] == x:
            found.append(rounded(points[at][1]))
        elif at == 0 or x - points[at - 1][0] > gap:
            found.append(None)
        elif at == len(points):
            found.append(rounded(points[-1][1]))
        else:
            (x0, y0), (x1, y1) = points[at - 1], points[at]
            found.append(None if x1 - x0 > gap else rounded(y0 + (y1 - y0) * (x - x0) / (x1 - x0)))
    return found


def chart(curves: Sequence[Points], size: int, most: int) -> dict[str, list[Any]]:
    """Return what a chart of many peers shows: ``x``, ``mean``, ``low`` and ``high`` of all, and
    ``each`` of the first ``most``.

    All have one y for each x, or None where there is none. The peers' curves are laid on the same
    x, so a late one does not bend the mean by where its points happen to be.
    """
    xs = grid(curves, size)
    each = [laid(points, xs) for points in curves]
    known = [[y for y in column if y is not None] for column in zip(*each, strict=True)]
    return {
        "x": [
            float(f"{x:.12g}") for x in xs
        ],  # rounds and seconds: five digits are too few for 100,000
        "mean": [rounded(statistics.fmean(ys)) if ys else None for ys in known],
        "low": [min(ys, default=None) for ys in known],
        "high": [max(ys, default=None) for ys in known],
        "each": each[:most],
    }
