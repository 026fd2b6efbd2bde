"""Which groups of other peers a node learns from in a round: those that teach it something, at random (SAPO, 2509.08721).

    picked = select(candidates, count=4, seed=secret, round=7, max_age=1, per_sender=2)
    groups = [pool[place] for place in picked.places]

Only what the choice depends on is here: the record that travels is the network's matter, and rewards are recomputed by whoever
calls this. There is no random state: the order follows from (seed, round, key), so it is the same in whatever order records came.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

REASONS = ("duplicate", "stale", "no_spread", "over_quota", "not_drawn")
"""Why a candidate was not picked, in the order in which that is looked at."""


@dataclass(frozen=True)
class Candidate:
    """A foreign group, as far as the choice is concerned."""

    key: str
    """Tells this group from all others: the hash of its content."""
    sender: str
    """Peer id of the signer."""
    round: int
    """Of this node, in which it came; not one that the sender states, who could state any."""
    rewards: tuple[float, ...]
    """Of its completions, recomputed by this node."""


@dataclass(frozen=True)
class Picked:
    """The outcome of `select`."""

    places: tuple[int, ...]
    """Where the picked ones stand among the candidates, in the order in which they were drawn."""
    left: dict[str, int]
    """How many of the others were left out for which of `REASONS`; all of these are named."""


def has_spread(rewards: Sequence[float]) -> bool:
    """Whether any completion of the group did better than another, so that there is an advantage to learn from."""
    return len(rewards) > 0 and min(rewards) < max(rewards)


def rank(seed: int, round: int, key: str) -> bytes:
    """The 32 bytes by which a group is placed in a round; uniform, and fresh each round."""
    return hashlib.sha256(f"shoal/rollouts/1:{seed}:{round}:{key}".encode()).digest()


def select(
    candidates: Sequence[Candidate], count: int, *, seed: int, round: int, max_age: int, per_sender: int | None = None
) -> Picked:
    """``count`` of the candidates (fewer if there are no more), uniformly among those that are fit.

    Fit is a group that is no copy of another one (same key), came at most ``max_age`` rounds ago, has some spread of rewards, and
    is not one too many of its sender: of each sender at most ``per_sender`` stay, drawn uniformly too (None: all). The public
    code (genrl) takes the groups with the highest reward instead, many of which have no spread; the paper's rule is followed.

    ``seed``: the node's own, kept to itself. A sender who knew it could change a word here and there until its groups come first.
    ``round``: the present one. A candidate of a later round, left by a node that went back to a checkpoint, counts as of this one.
    ValueError if ``count`` or ``max_age`` is below 0 or ``per_sender`` below 1.
    """
    if count < 0 or max_age < 0 or (per_sender is not None and per_sender < 1):
        raise ValueError(f"count and max_age must be at least 0 and per_sender at least 1, got {count}, {max_age} and {per_sender}")
    left = dict.fromkeys(REASONS, 0)
    seen: set[str] = set()
    taken: Counter[str] = Counter()
    places: list[int] = []
    for place in sorted(range(len(candidates)), key=lambda place: _order(candidates[place], seed, round)):
        candidate = candidates[place]
        if candidate.key in seen:
            left["duplicate"] += 1
            continue
        seen.add(candidate.key)
        if round - candidate.round > max_age:
            left["stale"] += 1
        elif not has_spread(candidate.rewards):
            left["no_spread"] += 1
        elif per_sender is not None and taken[candidate.sender] >= per_sender:
            left["over_quota"] += 1
        else:
            taken[candidate.sender] += 1
            if len(places) < count:
                places.append(place)
            else:
                left["not_drawn"] += 1
    return Picked(tuple(places), left)


def _order(candidate: Candidate, seed: int, round: int) -> tuple[bytes, int, str, tuple[float, ...]]:
    # Beyond the rank it decides which of several copies counts: the oldest, so that a group sent again does not grow young.
    return rank(seed, round, candidate.key), candidate.round, candidate.sender, candidate.rewards
