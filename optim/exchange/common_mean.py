"""Which contributions the mean of a group is over, where not every member holds all of them."""

from __future__ import annotations

from collections.abc import Mapping


def common_mean(held: Mapping[int, int]) -> tuple[int, int]:
    """Return the members whose contributions make the mean and those that take it, as bit sets of
    places; both 0 if there is none.

    The mean is over the contributions that every taker holds, including those of members that died
    meanwhile, and each taker's own is in it. Survivors that prevent this are left out one by one:
    first the one with the most others whose contribution it lacks or who lack its own; among equals
    the one whose contribution the fewest hold. So a member that claims to lack those of many
    excludes itself, not them.

    Args:
        held: for each survivor's place, the places whose complete contributions it holds, as bits,
            its own among them.
    """
    takers = dict(held)
    while len(takers) >= 2:
        mean = -1
        for places in takers.values():
            mean &= places
        if all(mean >> place & 1 for place in takers):
            return mean, sum(1 << place for place in takers)
        scores = {}
        for place, own in takers.items():
            holders = sum(places >> place & 1 for places in takers.values())
            lacks = sum(not own >> other & 1 for other in takers)
            scores[place] = (holders - lacks, holders, place)
        del takers[min(takers, key=scores.__getitem__)]
    return 0, 0
