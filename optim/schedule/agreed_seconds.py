"""How many seconds a round has, where its length follows from the peers' speeds.

    agreed_seconds([4.0, 2.0, 1.0])          # 11.3: the slowest makes its 10 steps

Why no liar can move it far: docs/internals.md, "Rounds of seconds".
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

STEPS = 10
"""Least inner steps of the slowest useful peer in a round."""
USEFUL = 1 / 8
"""Rounds are not lengthened for a peer slower than this part of the median speed."""
SHORTEST_S = 1.0
"""Seconds of a round at least, and of the first rounds of a swarm, which measure the speeds."""
LONGEST_S = 600.0
"""Seconds of a round at most: a slow swarm averages six times an hour."""
GRID = 4
"""Lengths are powers of 2^(1/GRID), so that slightly different views give the same one."""


def agreed_seconds(speeds: Iterable[float]) -> float:
    """Return the seconds in which the slowest useful peer makes at least ``STEPS`` inner steps (if
    ``LONGEST_S`` allows it).

    A pure function of the peers' inner steps a second, in any order (0, NaN and negative numbers:
    not measured yet). Without any speed it is ``SHORTEST_S``.
    """
    ordered = sorted(speed for speed in speeds if 0 < speed < math.inf)
    if not ordered:
        return SHORTEST_S
    # The lower middle one of an even number, so of two peers both are useful.
    median = ordered[(len(ordered) - 1) // 2]
    slowest = next(speed for speed in ordered if speed >= median * USEFUL)
    wanted = min(max(STEPS / slowest, SHORTEST_S), LONGEST_S)
    # The small amount allows for rounding of the logarithm, so that a length on the grid is not
    # changed.
    rounded = math.pow(2.0, math.ceil(math.log2(wanted) * GRID - 1e-9) / GRID)
    return min(max(rounded, SHORTEST_S), LONGEST_S)


def bounded_speeds(
    speeds: Collection[float], trusted: Collection[float], most: float
) -> list[float]:
    """Return ``speeds`` for `agreed_seconds`, or one in their place that makes the length ``most``
    times longer or shorter than the ``trusted`` speeds do, if they would move it further. Whoever
    sees the same within that bound agrees on the same length.
    """
    wanted = agreed_seconds(speeds)
    near = agreed_seconds(trusted)
    bounded = min(max(wanted, near / most), near * most)
    if bounded == wanted or not any(speed > 0 for speed in trusted):
        return [*speeds]
    return [STEPS / bounded]
