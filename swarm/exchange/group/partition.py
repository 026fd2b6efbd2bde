"""The arithmetic of groups, without a network: how peers are dealt into groups, and whose contributions make the mean."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from shoal.optim.exchange.pairing import order


def deal(seed: int, round: int, peers: Iterable[str], largest: int) -> list[tuple[str, ...]]:
    """The peers in as few groups of at most ``largest`` as possible, nearly equal in size, the same for all who know the peers.

    Nobody is left alone: an odd number of peers in pairs leaves one group of three. ValueError unless ``largest`` is 2 or more.
    """
    if largest < 2:
        raise ValueError(f"a group needs at least two peers, got at most {largest}")
    ordered = order(seed, round, peers)
    count = max(1, min(-(-len(ordered) // largest), len(ordered) // 2))
    bounds = [number * len(ordered) // count for number in range(count + 1)]
    return [tuple(ordered[start:end]) for start, end in itertools.pairwise(bounds)]
