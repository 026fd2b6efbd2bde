"""The arithmetic of groups, without a network: how peers are dealt into groups, and whose contributions make the mean."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from optim.pairing import order


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


def common(held: Mapping[int, int]) -> tuple[int, int]:
    """Whose contributions make the mean, and who takes it: both as sets of places, both empty if it is off.

    ``held``: for each survivor's place, the places whose contributions it holds whole, as bits, its own among them.

    The mean is of the contributions that every taker holds, those of members that died meanwhile included, and each taker's own
    is in it. Survivors for whom that cannot be (their link to another is broken, or nobody could use what they sent) are left
    out one by one, those first whom the fewest hold.
    """
    takers = dict(held)
    while len(takers) >= 2:
        mean = -1
        for places in takers.values():
            mean &= places
        outside = [place for place in takers if not mean >> place & 1]
        if not outside:
            return mean, sum(1 << place for place in takers)
        wanted = {place: sum(places >> place & 1 for places in takers.values()) for place in outside}
        del takers[min(outside, key=lambda place: (wanted[place], place))]
    return 0, 0
