"""The length of a round in seconds, computed by every peer from the speeds that all peers see."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

STEPS = 10
"""Least inner steps of the slowest useful peer in a round."""
USEFUL = 1 / 8
"""Rounds are not lengthened for a peer slower than this part of the median speed."""
SHORTEST_S, LONGEST_S = 1.0, 600.0
"""Limits of the length, in seconds."""
GRID = 4
"""Lengths are powers of 2^(1/GRID)."""


def agreed_seconds(speeds: Iterable[float]) -> float:
    """Return the seconds in which the slowest useful peer makes at least ``STEPS`` inner steps (if ``LONGEST_S`` allows it).

    A pure function of the peers' inner steps a second, in any order (0, NaN and negative numbers: not measured yet). Slightly
    different views give the same length, since it is rounded up to a coarse grid. One liar among at least three peers cannot move
    it beyond 8 times what the others' speeds allow: a slow liar is at best just useful, a fast one only shifts the median to
    another honest peer. The median of an even number is the lower middle one, so of two peers both are useful. (Ours.)

    Without any speed it is ``SHORTEST_S``: a new swarm measures them soon.
    """
    known = sorted(speed for speed in speeds if 0 < speed < math.inf)
    if not known:
        return SHORTEST_S
    median = known[(len(known) - 1) // 2]
    slowest = next(speed for speed in known if speed >= median * USEFUL)
    wanted = min(max(STEPS / slowest, SHORTEST_S), LONGEST_S)
    # The small amount allows for rounding of the logarithm, so that a length on the grid is not changed.
    rounded = math.pow(2.0, math.ceil(math.log2(wanted) * GRID - 1e-9) / GRID)
    return min(max(rounded, SHORTEST_S), LONGEST_S)


def bounded_speeds(speeds: Collection[float], known: Collection[float], most: float) -> list[float]:
    """Return ``speeds`` for `agreed_seconds`, or one in their place that makes the length ``most`` times longer or shorter than the
    ``known`` speeds do, if they would move it further. Whoever sees the same within that bound agrees on the same length.
    """
    wanted, near = agreed_seconds(speeds), agreed_seconds(known)
    bounded = min(max(wanted, near / most), near * most)
    return [*speeds] if bounded == wanted or not any(speed > 0 for speed in known) else [STEPS / bounded]
