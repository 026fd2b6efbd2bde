"""Who averages with whom, without a coordinator: every peer orders the peers it sees by hash(seed, round, peer id).

Peers that see the same membership compute the same groups, and no message is needed to agree. Peers that see different
memberships disagree about some pairs only; ``candidates`` is the order in which such a peer tries the others.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping


@functools.lru_cache(maxsize=8192)  # a round asks for each peer's several times
def rank(seed: int, round: int, peer: str) -> bytes:
    """The 32 bytes by which a peer is placed in a round; uniform and fresh each round."""
    return hashlib.sha256(f"shoal/pairing/1:{seed}:{round}:{peer}".encode()).digest()


def order(seed: int, round: int, peers: Iterable[str]) -> list[str]:
    """All peers in the order of the round."""
    return sorted(set(peers), key=functools.partial(rank, seed, round))


def groups(seed: int, round: int, peers: Iterable[str], size: int = 2) -> list[tuple[str, ...]]:
    """Consecutive groups of ``size``; the last one may be smaller (with pairs: one peer goes alone when the number is odd)."""
    if size < 1:
        raise ValueError(f"a group needs at least one peer, got size {size}")
    ordered = order(seed, round, peers)
    return [tuple(ordered[start : start + size]) for start in range(0, len(ordered), size)]


def partner_of(seed: int, round: int, me: str, peers: Iterable[str]) -> str | None:
    """My partner of the round, or None when I am the odd one out."""
    ordered = order(seed, round, {*peers, me})
    return _beside(ordered, ordered.index(me))


def _beside(ordered: list[str], here: int) -> str | None:
    """The other one in the group of two at that place."""
    there = here ^ 1
    return ordered[there] if there < len(ordered) else None


def candidates(seed: int, round: int, me: str, peers: Iterable[str]) -> list[str]:
    """My partner first, then every other peer in the order of the round, starting behind me and wrapping around."""
    ordered = order(seed, round, {*peers, me})
    here = ordered.index(me)
    behind = ordered[here + 1 :] + ordered[:here]
    partner = _beside(ordered, here)
    if partner is not None:
        behind.remove(partner)
        behind.insert(0, partner)
    return behind


def common(held: Mapping[int, int]) -> tuple[int, int]:
    """Whose contributions make the mean, and who takes it: both as sets of places, both empty if it is off.

    ``held``: for each survivor's place, the places whose contributions it holds whole, as bits, its own among them.

    The mean is of the contributions that every taker holds, those of members that died meanwhile included, and each taker's own
    is in it. Survivors for whom that cannot be are left out one by one: first whoever has the most others whose contribution it
    lacks or who lack its own (its links are broken, or nobody can use what it sent, or it says so of the others: one that says
    so of many puts itself out, not them); then whom the fewest hold.
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
