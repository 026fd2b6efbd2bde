"""Consensus distance of a swarm: how far apart the peers' slow weights are, from the projections in
their statuses.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Sequence

from shoal.node.watch.curves import Curve
from shoal.swarm.topics.status import Projection

COMPARED = 4
"""Newest exchanges of which the peers' weights are compared."""


class Consensus:
    """Curve of the consensus distance by round.

    The peers' projections of one exchange are compared when all have sent theirs, or it is old.
    """

    def __init__(self) -> None:
        self.curve = Curve()
        self._projections: OrderedDict[int, dict[str, tuple[float, ...]]] = OrderedDict()

    def add(self, peer: str, projection: Projection, here: Collection[str], fragments: int) -> None:
        """Take in the ``projection`` of a peer's weights; ``here``: the peers that take part."""
        exchange, norm, sums = projection
        points = self.curve.points
        if exchange not in self._projections and points and exchange / fragments <= points[-1][0]:
            return
        self._projections.setdefault(exchange, {})[peer] = (*sums, norm)
        while self._projections:
            oldest = min(self._projections)
            known = self._projections[oldest]
            is_complete = len(known) > 1 and all(key in known for key in here)
            if not is_complete and len(self._projections) <= COMPARED:
                return
            del self._projections[oldest]
            distance = consensus_distance(list(known.values()))
            if distance is not None:
                self.curve.add(oldest / fragments, distance)


def consensus_distance(projections: Sequence[Sequence[float]]) -> float | None:
    """Return the RMS distance of all pairs over the RMS norm; None below two peers, or if all
    weights are zero.

    ``projections``: of each peer the sums, and last the norm (`shoal.optim.outer.sketch`). With K
    peers the error is about 1 / sqrt(32 (K - 1)) of the distance.
    """
    if len(projections) < 2:
        return None
    sums = [projection[:-1] for projection in projections]
    # The mean square over all pairs is twice the unbiased variance, so no pair has to be looked at.
    mean = [math.fsum(column) / len(sums) for column in zip(*sums, strict=True)]
    apart = 2 * math.fsum(math.dist(one, mean) ** 2 for one in sums) / (len(sums) - 1)
    size = math.fsum(projection[-1] ** 2 for projection in projections) / len(projections)
    return math.sqrt(apart / size) if size else None
