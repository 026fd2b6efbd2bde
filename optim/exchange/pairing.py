"""Pairing without a coordinator: every peer orders the peers it sees by hash(seed, round, peer id).

Peers that see the same membership compute the same groups without a message. Peers that see different memberships disagree about
some pairs only; ``candidates`` is the order in which such a peer tries the others.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping


@functools.lru_cache(maxsize=8192)  # a round needs the rank of each peer several times
def rank(seed: int, round: int, peer: str) -> bytes:
    """Return the 32 bytes by which a peer is ordered in a round; uniform, and new each round."""
    return hashlib.sha256(f"shoal/pairing/1:{seed}:{round}:{peer}".encode()).digest()


def order(seed: int, round: int, peers: Iterable[str]) -> list[str]:
    return sorted(set(peers), key=functools.partial(rank, seed, round))


def groups(seed: int, round: int, peers: Iterable[str], size: int = 2) -> list[tuple[str, ...]]:
    """Return consecutive groups of ``size``; the last may be smaller (with pairs: one peer has no partner if the number is odd)."""
    if size < 1:
        raise ValueError(f"a group needs at least one peer, got size {size}")
    ordered = order(seed, round, peers)
    return [tuple(ordered[start : start + size]) for start in range(0, len(ordered), size)]


def partner_of(seed: int, round: int, me: str, peers: Iterable[str]) -> str | None:
    """Return the partner of ``me`` in the round, or None if the number of peers leaves it over."""
    ordered = order(seed, round, {*peers, me})
    return _beside(ordered, ordered.index(me))


def _beside(ordered: list[str], here: int) -> str | None:
    """Return the other member of the pair at that place, or None."""
    there = here ^ 1
    return ordered[there] if there < len(ordered) else None


def candidates(seed: int, round: int, me: str, peers: Iterable[str]) -> list[str]:
    """Return the partner of ``me``, then every other peer in the order of the round, starting after ``me`` and wrapping around."""
    ordered = order(seed, round, {*peers, me})
    here = ordered.index(me)
    behind = ordered[here + 1 :] + ordered[:here]
    partner = _beside(ordered, here)
    if partner is not None:
        behind.remove(partner)
        behind.insert(0, partner)
    return behind


def common(held: Mapping[int, int]) -> tuple[int, int]:
    """Return the members whose contributions make the mean and those that take it, as bit sets of places; both 0 if there is none.

    ``held``: for each survivor's place, the places whose complete contributions it holds, as bits, its own among them.

    The mean is over the contributions that every taker holds, including those of members that died meanwhile, and each taker's
    own is in it. Survivors that prevent this are left out one by one: first the one with the most others whose contribution it
    lacks or who lack its own (its links are broken, its contribution is unusable, or it claims that of the others: a member that
    claims it of many excludes itself, not them); among equals the one whose contribution the fewest hold.
    """
    takers = dict(held)
    while len(takers) >= 2:
        mean = -1
        for places in takers.values():
            mean &= places
        if all(mean >> place & 1 for place in takers):
            return mean, sum(1 << place for place in takers)
        wanted = {place: sum(places >> place & 1 for places in takers.values()) for place in takers}
        lacks = {place: sum(not places >> other & 1 for other in takers) for place, places in takers.items()}
        del takers[min(takers, key=lambda place: (wanted[place] - lacks[place], wanted[place], place))]
    return 0, 0
