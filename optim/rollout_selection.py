"""Random selection of the groups of other nodes that a node learns from in a round (swarm sampling,
SAPO, arXiv 2509.08721). A group is the completions of one question, with their rewards.

    selection = select(candidates, count=4, seed=secret, round=7, max_age=1, per_sender=2)
    groups = [received[index] for index in selection.indices]

The caller recomputes the rewards. There is no random state: the order of drawing follows from
(seed, round, key), whatever the order in which groups arrived. Why at random: docs/internals.md,
"Losses of reinforcement learning".
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
    """By how many versions the policy that wrote it is behind its sender's newest, as the caller
    counts it.
    """


@dataclass(frozen=True)
class Selection:
    """Outcome of `select`."""

    indices: tuple[int, ...]
    """Of the picked candidates, in the order in which they were drawn."""
    left_out: dict[str, int]
    """How many candidates were not picked, by each of `REASONS`; 0 where none."""


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
) -> Selection:
    """Pick ``count`` candidates, or all that may be, in a random order.

    A candidate is left out for the first of `REASONS` that applies. Every group is as likely to
    come first, so who shares more is drawn more often.

    Args:
        candidates: in any order. Of copies (same key) the one that arrived first is considered.
        count: how many to pick.
        seed: the node's own, and secret: a sender who knew it could vary its groups until they
            come first.
        round: the present one. If this node went back to a checkpoint, a candidate may have arrived
            in a later round, and is not stale.
        max_age: greatest age in rounds; 0: only what arrived in this one.
        per_sender: at most so many groups of one sender; None: no limit.
        max_behind: greatest `Candidate.behind`; None: no limit.

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
    left_out = dict.fromkeys(REASONS, 0)
    seen: set[str] = set()
    of_sender: Counter[str] = Counter()
    indices: list[int] = []
    order = sorted(range(len(candidates)), key=lambda at: _draw_key(candidates[at], seed, round))
    for index in order:
        candidate = candidates[index]
        if candidate.key in seen:
            left_out["duplicate"] += 1
            continue
        seen.add(candidate.key)
        if round - candidate.round > max_age:
            left_out["stale"] += 1
        elif max_behind is not None and candidate.behind > max_behind:
            left_out["off_policy"] += 1
        elif not has_spread(candidate.rewards):
            left_out["no_spread"] += 1
        elif per_sender is not None and of_sender[candidate.sender] >= per_sender:
            left_out["over_quota"] += 1
        else:
            of_sender[candidate.sender] += 1
            if len(indices) < count:
                indices.append(index)
            else:
                left_out["not_drawn"] += 1
    return Selection(tuple(indices), left_out)


def _draw_key(
    candidate: Candidate, seed: int, round: int
) -> tuple[bytes, int, str, tuple[float, ...]]:
    digest = hashlib.sha256(f"shoal/rollouts/1:{seed}:{round}:{candidate.key}".encode()).digest()
    # Copies have the same digest, and the one that arrived first comes first.
    return digest, candidate.round, candidate.sender, candidate.rewards
