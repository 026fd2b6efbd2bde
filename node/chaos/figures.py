"""What a run came to, as pure functions of when each node did its steps."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

Span = tuple[float, float]


@dataclass
class Life:
    """One process of a node, from its start to its end. All times are Unix seconds."""

    peer: int
    spawned: float
    ended: float | None = None
    """When it was killed or ended; None: it was there in the end."""
    steps: list[tuple[float, int]] = field(default_factory=list)
    """When each inner step was done, and how many the node had then done in all its lives."""
    stopped: list[Span] = field(default_factory=list)
    """While it was stopped by us."""
    joined: float | None = None
    """When its first contribution was accepted by somebody."""
    resumed: bool = False
    """It went on from a checkpoint."""
    killed: bool = False
    """It was ended by a kill of the plan."""


def restarts(lives: Iterable[Life]) -> list[Life]:
    """All lives but the first of each node; ``lives`` of a node are in order."""
    found, seen = [], set()
    for life in lives:
        if life.peer in seen:
            found.append(life)
        seen.add(life.peer)
    return found


def overlap(spans: Iterable[Span], begin: float, end: float) -> float:
    """Seconds of [begin, end] that lie in ``spans``, which do not overlap each other."""
    return sum(max(min(end, until) - max(begin, since), 0.0) for since, until in spans)


def _end(life: Life, until: float) -> float:
    return until if life.ended is None else min(life.ended, until)


def longest_gap(life: Life, until: float) -> float | None:
    """Longest time without a finished inner step, less what the node itself was stopped by us; None before its first step.

    The time from the last step to the end counts too, so a node that hangs for good is not overlooked; a killed node's does not.
    """
    times = [at for at, _ in life.steps if at <= until]
    if not times:
        return None
    if life.ended is None or life.ended > until:
        times.append(until)
    gaps = (after - before - overlap(life.stopped, before, after) for before, after in pairwise(times))
    return max(gaps, default=0.0)


def pace(lives: Sequence[Life], until: float, *, with_starts: bool = False) -> float | None:
    """Inner steps done by all, for each second that a node was alive; None if nobody was.

    Alive is from the first step (or, ``with_starts``, from the start of the process) to the end, without stops.
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
    """Inner steps that nodes did and then had not done any more, while they lived."""
    return sum(max(before + 1 - after, 0) for life in lives for (_, before), (_, after) in pairwise(life.steps))


def steps_lost_by_kills(lives: Sequence[Life]) -> int:
    """Inner steps that killed nodes had done since the checkpoint from which they went on. ``lives`` of a node are in order."""
    lost = 0
    for peer in {life.peer for life in lives}:
        mine = [life for life in lives if life.peer == peer and life.steps]
        for before, after in pairwise(mine):
            if before.killed and after.resumed:
                lost += max(before.steps[-1][1] + 1 - after.steps[0][1], 0)
    return lost


def next_step_s(lives: Sequence[Life], peer: int, at: float) -> float | None:
    """Seconds from the kill of ``peer`` at ``at`` until the last of the survivors has done its next step; None without survivors.

    Survivors are those who had begun to train, and neither were stopped nor had ended before they got to it.
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
    """Common slope of several series of (time in seconds, value), each about its own mean: least squares, value a minute.

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


def binned(points: Sequence[tuple[float, float]], begin: float, end: float, bins: int = 10) -> list[float | None]:
    """Mean value of (time, value) in each of ``bins`` equal parts of [begin, end); None where there is nothing."""
    ordered = sorted(points)
    times = [at for at, _ in ordered]
    edges = [begin + (end - begin) * number / bins for number in range(bins + 1)]
    result: list[float | None] = []
    for since, until in pairwise(edges):
        values = [value for _, value in ordered[bisect_left(times, since) : bisect_left(times, until)]]
        result.append(fmean(values) if values else None)
    return result
