"""Which slow weights count when those of a round's members differ.

    sources({"a": (1.0, 2.0), "b": (1.0, 2.0), "c": (1.5, 2.0)})      # ["a"]: c takes a's

Peers under a rule that sends displacements have equal slow weights, unless a round failed for some
of them. Why the largest part is right: docs/internals.md, "Slow weights that differ".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

SAME_SKETCH = 1e-6
"""Distance of two sketches, in parts of their largest number, that rounding alone explains."""


def sources(states: Mapping[str, Sequence[float]], *, first: bool = False) -> list[str]:
    """Return the peers whose slow weights all members should take the mean of.

    Args:
        states: the sketch of each member's slow weights.
        first: nothing was averaged yet, so there is nothing in common.

    Returns:
        One peer of the largest part that holds the same, or one of each of the largest parts; with
        ``first`` one peer. None if all hold the same.
    """
    parts: list[list[str]] = []
    for peer in sorted(states):
        for part in parts:
            if _same(states[peer], states[part[0]]):
                part.append(peer)
                break
        else:
            parts.append([peer])
    if len(parts) < 2:
        return []
    most = max(map(len, parts))
    largest = [part[0] for part in parts if len(part) == most]
    return largest[:1] if first else largest


def _same(one: Sequence[float], other: Sequence[float]) -> bool:
    largest = max(map(abs, (*one, *other)))
    return math.dist(one, other) <= SAME_SKETCH * largest
