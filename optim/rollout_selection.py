"""Random selection of the foreign groups that a node learns from in a round (SAPO, 2509.08721).

    picked = select(candidates, count=4, seed=secret, round=7, max_age=1, per_sender=2)
    groups = [pool[place] for place in picked.places]

The caller recomputes the rewards. There is no random state: the order follows from (seed, round,
key), whatever the order in which records arrived. Why at random: docs/internals.md, "Losses of
reinforcement learning".
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

REASONS = ("duplicate", "stale", "off_policy", "no_spread", "over_quota", "not_drawn")
"""Reasons for not picking a candidate, in the order of the checks."""


@dataclass(frozen=True)
class Candidate:
    """Foreign group, with the properties that the selection depends on."""

    key: str
    """Hash of its content, which identifies the group."""
    sender: str
    """Peer id of the signer."""
    round: int
    """This node's round when it arrived; not one stated by the sender, who could state any."""
    rewards: tuple[float, ...]
    """Rewards of its completions, recomputed by this node."""
    behind: int = 0
    """Versions of its sender's policy from the one that wrote it to the sender's newest."""


@dataclass(frozen=True)
class Picked:
    """Outcome of `select`."""

    places: tuple[int, ...]
    """Indices of the picked candidates, in the order in which they were drawn."""
    left: dict[str, int]
    """Number of candidates left out for each of `REASONS`; all are keys."""


def has_spread(rewards: Sequence[float]) -> bool:
    """Return True if the rewards of a group differ, so that there is an advantage to learn from."""
    return len(rewards) > 0 and min(rewards) < max(rewards)


def select(
    candidates: Sequence[Candidate],
    count: int,
    *,
    seed: int,
    round: int,
    max_age: int,
    per_sender: int | None = None,
    max_behind: int | None = None,
) -> Picked:
    """Pick ``count`` candidates (or all, if fewer), uniformly among the eligible ones.

    A group is eligible unless it has one of the `REASONS`, of which the first that applies counts.

    Args:
        candidates: in any order; of copies (same key) the oldest counts.
        count: how many to pick.
        seed: the node's own, and secret: a sender who knew it could vary its groups until they
            come first.
        round: the present one. A candidate of a later round, left by a node that went back to a
            checkpoint, counts as of this one.
        max_age: rounds since a group arrived, at most.
        per_sender: groups of one sender that remain, drawn uniformly too; None: all.
        max_behind: versions of its sender's policy that a group may be behind (prime-rl's
            max_off_policy_steps); None: any number.

    Raises:
        ValueError: ``count``, ``max_age`` or ``max_behind`` below 0, or ``per_sender`` below 1.
    """
    if max_behind is not None and max_behind < 0:
        raise ValueError(f"max_behind must be at least 0, got {max_behind}")
    if count < 0 or max_age < 0 or (per_sender is not None and per_sender < 1):
        raise ValueError(
            f"count and max_age must be at least 0 and per_sender at least 1, got {count}, "
            f"{max_age} and {per_sender}"
        )
    left = dict.fromkeys(REASONS, 0)
    keys: set[str] = set()
    taken: Counter[str] = Counter()
    places: list[int] = []
    order = sorted(range(len(candidates)), key=lambda at: _order(candidates[at], seed, round))
    for place in order:
        candidate = candidates[place]
        if candidate.key in keys:
            left["duplicate"] += 1
            continue
        keys.add(candidate.key)
        if round - candidate.round > max_age:
            left["stale"] += 1
        elif max_behind is not None and candidate.behind > max_behind:
            left["off_policy"] += 1
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


def _order(
    candidate: Candidate, seed: int, round: int
) -> tuple[bytes, int, str, tuple[float, ...]]:
    digest = hashlib.sha256(f"shoal/rollouts/1:{seed}:{round}:{candidate.key}".encode()).digest()
    # Beyond the digest, uniform and new each round, it decides which of several copies counts: the
    # oldest, so that resending does not make a group younger.
    return digest, candidate.round, candidate.sender, candidate.rewards
