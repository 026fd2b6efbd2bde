"""The length of a round in seconds, found by every peer for itself from the speeds that all peers see."""

from __future__ import annotations

import math
from collections.abc import Iterable

STEPS = 10
"""Inner steps that the slowest useful peer makes in a round, at least."""
USEFUL = 1 / 8
"""A peer slower than this part of the median speed is not waited for: it does what it can."""
SHORTEST_S, LONGEST_S = 1.0, 600.0
"""Limits of the length, in seconds."""
GRID = 4
"""Lengths are powers of 2^(1/GRID)."""


def agreed_seconds(
    speeds: Iterable[float], *, steps: int = STEPS, shortest: float = SHORTEST_S, longest: float = LONGEST_S
) -> float:
    """Seconds of a round in which the slowest useful peer makes at least ``steps`` inner steps (if ``longest`` allows it).

    A pure function of the peers' inner steps a second (0 and what is no positive number: not measured yet), in any order. Views
    that differ a little give the same length, since it is rounded up to a coarse grid. One liar among at least three cannot move
    it out of what the others' speeds allow, times 8: a slow one is at best just useful, a fast one only shifts the median to
    another honest peer. Of two speeds in the middle the lower is the median, so of two peers both are useful. (Ours.)

    Without any speed it is ``shortest``: a swarm that begins finds out soon.
    """
    known = sorted(speed for speed in speeds if 0 < speed < math.inf)
    if not known:
        return shortest
    median = known[(len(known) - 1) // 2]
    slowest = next(speed for speed in known if speed >= median * USEFUL)
    wanted = min(max(steps / slowest, shortest), longest)
    # The small amount forgives the rounding of the logarithm, so that a length on the grid stays itself.
    rounded = math.pow(2.0, math.ceil(math.log2(wanted) * GRID - 1e-9) / GRID)
    return min(max(rounded, shortest), longest)
