"""Who averages with whom in a round, without a coordinator.

    partners_of(seed, round, "a", peers)         # whom "a" exchanges with
    candidates(seed, round, "a", peers)          # whom "a" tries, its partner first

Every peer orders the peers that it sees by hash(seed, round, peer id), so those that see the same
membership compute the same groups. Those that see another disagree about some pairs only;
``candidates`` is the order in which such a peer tries the others.

If the number of peers is odd, the last three are a *chain*: the middle one exchanges with both
ends, each time as a pair does. Why: docs/internals.md, "An odd number of peers".
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable


@functools.lru_cache(maxsize=8192)  # a round needs the rank of each peer several times
def rank(seed: int, round: int, peer: str) -> bytes:
    """Return the 32 bytes by which a peer is ordered in a round; uniform, and new each round."""
    return hashlib.sha256(f"shoal/pairing/1:{seed}:{round}:{peer}".encode()).digest()


def order(seed: int, round: int, peers: Iterable[str]) -> list[str]:
    return sorted(set(peers), key=functools.partial(rank, seed, round))


def groups(seed: int, round: int, peers: Iterable[str], size: int = 2) -> list[tuple[str, ...]]:
    """Return consecutive groups of ``size``; the last may be smaller (with pairs: one peer is left
    over if the number is odd; see ``chains``).
    """
    if size < 1:
        raise ValueError(f"a group needs at least one peer, got size {size}")
    ordered = order(seed, round, peers)
    return [tuple(ordered[start : start + size]) for start in range(0, len(ordered), size)]


def chains(seed: int, round: int, peers: Iterable[str]) -> list[tuple[str, ...]]:
    """Return pairs; of an odd number of peers the last three, in the order of their chain."""
    found = groups(seed, round, peers)
    if len(found) > 1 and len(found[-1]) == 1:
        left_over = found.pop()
        found[-1] += left_over
    return found


def partner_of(seed: int, round: int, me: str, peers: Iterable[str]) -> str | None:
    """Return the partner in the pair of ``me``, or None if the number of peers leaves it over: then
    it exchanges with the middle of its chain (``partners_of``).
    """
    (pair,) = (pair for pair in groups(seed, round, {*peers, me}) if me in pair)
    return next((peer for peer in pair if peer != me), None)


def partners_of(seed: int, round: int, me: str, peers: Iterable[str]) -> tuple[str, ...]:
    """Return whom ``me`` exchanges with: one peer; two for the middle of a chain; none if ``me`` is
    the only peer.
    """
    (chain,) = (chain for chain in chains(seed, round, {*peers, me}) if me in chain)
    place = chain.index(me)
    return chain[:place][-1:] + chain[place + 1 :][:1]


def candidates(seed: int, round: int, me: str, peers: Iterable[str]) -> list[str]:
    """Return the partner of ``me``, then every other peer in the order of the round, starting after
    ``me`` and wrapping around.
    """
    peers = list(peers)
    partner = partner_of(seed, round, me, peers)
    ordered = order(seed, round, {*peers, me})
    here = ordered.index(me)
    behind = ordered[here + 1 :] + ordered[:here]
    if partner is None:
        return behind
    return [partner, *(peer for peer in behind if peer != partner)]
