"""Consensus distance of a swarm: how far apart the peers' slow weights are, from the projections in their statuses."""

from __future__ import annotations

import math
from collections.abc import Sequence


def consensus_distance(projections: Sequence[Sequence[float]]) -> float | None:
    """Return the RMS distance of all pairs over the RMS norm; None below two peers, or if all weights are zero.

    ``projections``: of each peer the sums, and last the norm (`shoal.optim.outer.sketch`). With K peers the error is about
    1 / sqrt(32 (K - 1)) of the distance.
    """
    if len(projections) < 2:
        return None
    sums = [projection[:-1] for projection in projections]
    # The mean square over all pairs is twice the unbiased variance, so no pair has to be looked at.
    mean = [math.fsum(column) / len(sums) for column in zip(*sums, strict=True)]
    apart = 2 * math.fsum(math.dist(one, mean) ** 2 for one in sums) / (len(sums) - 1)
    size = math.fsum(projection[-1] ** 2 for projection in projections) / len(projections)
    return math.sqrt(apart / size) if size else None
