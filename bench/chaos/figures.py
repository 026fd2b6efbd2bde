"""Figures of a run, as pure functions of the times of each node's steps."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

Span = tuple[float, float]


@dataclass
class Life:
    """Process of a node, from its start to its end. All times are Unix seconds."""

    peer: int
    spawned: float
    ended: float | None = None
    """Time of its end; None: it was there in the end."""
    steps: list[tuple[float, int]] = field(default_factory=list)
    """Time of each inner step, and the number of the node's steps in all its lives until then."""
    stopped: list[Span] = field(default_factory=list)
    """Spans in which it was stopped by the plan."""
    joined: float | None = None
    """Time at which its first contribution was accepted by a peer."""
    resumed: bool = False
    """True if it resumed from a checkpoint."""
    killed: bool = False
    """True if the plan killed it."""


def restarts(lives: Iterable[Life]) -> list[Life]:
    """Return all lives but the first of each node; ``lives`` of a node are in order."""
    found, seen = [], set()
    for life in lives:
        if life.peer in seen:
            found.append(life)
        seen.add(life.peer)
    return found


def overlap(spans: Iterable[Span], begin: float, end: float) -> float:
    """Return the seconds of [begin, end] within ``spans``, which do not overlap each other."""
    return sum(max(min(end, until) - max(begin, since), 0.0) for since, until in spans)


def _end(life: Life, until: float) -> float:
    return until if life.ended is None else min(life.ended, until)


def longest_gap(life: Life, until: float) -> float | None:
    """Return the longest time without a finished inner step, less the node's own stops; None before
    its first step.

    The time from the last step to the end counts too, so a node that hangs for good is not
    overlooked; a killed node's does not.
    """
    times = [at for at, _ in life.steps if at <= until]
    if not times:
        return None
    if life.ended is None or life.ended > until:
        times.append(until)
    gaps = (
        after - before - overlap(life.stopped, before, after) for before, after in pairwise(times)
    )
    return max(gaps, default=0.0)


def speed(lives: Sequence[Life], until: float, *, with_starts: bool = False) -> float | None:
    """Return the inner steps of all for each second that a node was alive; None if none was.

    Alive is from the first step (or, ``with_starts``, from the start of the process) to the end,
    without stops.
    """
    steps, seconds = 0, 0.0
    for life in lives:
        times = [at for at, _ in life.steps if at <= until]
        if not times and not with_starts:
            continue
        begin = life.spawned if with_starts else times[0]
        end = max(_end(life, until), begin)
        steps += len(times) - (0 if with_starts else 1)
        seconds += end - begin - overlap(life.stopped, begin, end)
    return steps / seconds if seconds > 0 else None


def steps_lost(lives: Iterable[Life]) -> int:
    """Return the inner steps that living nodes did and then lost."""
    return sum(
        max(before + 1 - after, 0)
        for life in lives
        for (_, before), (_, after) in pairwise(life.steps)
    )


def steps_lost_by_kills(lives: Sequence[Life]) -> int:
    """Return the inner steps of killed nodes since the checkpoint from which they resumed.

    ``lives`` of a node are in order.
    """
    lost = 0
    for peer in {life.peer for life in lives}:
        mine = [life for life in lives if life.peer == peer and life.steps]
        for before, after in pairwise(mine):
            if before.killed and after.resumed:
                lost += max(before.steps[-1][1] + 1 - after.steps[0][1], 0)
    return lost


def next_step_s(lives: Sequence[Life], peer: int, at: float) -> float | None:
    """Return the seconds from the kill of ``peer`` at ``at`` until the last survivor's next step;
    None without survivors.

    Survivors are those who had begun to train, and neither were stopped nor had ended before they
    got to it.
    """
    waits = []
    for life in lives:
        times = [time for time, _ in life.steps]
        here = bisect_right(times, at)
        if life.peer == peer or here == 0 or here == len(times):
            continue
        if overlap(life.stopped, at, times[here]) == 0:
            waits.append(times[here] - at)
    return max(waits, default=None)


def slope(series: Iterable[Sequence[tuple[float, float]]]) -> float | None:
    """Return the common slope of series of (time in seconds, value), each about its own mean: least
    squares, value a minute.

    None if no series has two different times.
    """
    above = below = 0.0
    for points in series:
        if len(points) < 2:
            continue
        when, what = fmean(at for at, _ in points), fmean(value for _, value in points)
        above += sum((at - when) * (value - what) for at, value in points)
        below += sum((at - when) ** 2 for at, _ in points)
    return 60 * above / below if below > 0 else None


def binned(
    points: Sequence[tuple[float, float]], begin: float, end: float, bins: int = 10
) -> list[float | None]:
    """Return the mean value of (time, value) in each of ``bins`` equal parts of [begin, end); None
    for an empty one.
    """
    ordered = sorted(points)
    times = [at for at, _ in ordered]
    edges = [begin + (end - begin) * number / bins for number in range(bins + 1)]
    result: list[float | None] = []
    for since, until in pairwise(edges):
        values = [
            value for _, value in ordered[bisect_left(times, since) : bisect_left(times, until)]
        ]
        result.append(fmean(values) if values else None)
    return result
