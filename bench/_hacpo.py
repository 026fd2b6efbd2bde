"""What HACPO (arXiv 2603.02604) changes for groups that another node wrote, one change at a time.

``capability`` of a node is the mean reward of what it wrote in the last rounds, as the learner
judges it; ``ratio`` that of a group's author over the learner's. The changes:

* ``baseline``: an advantage is over the mean of the group divided by ``ratio``, which is what the
  learner would have reached itself (equations 5 and 6);
* ``weight``: it is multiplied by ``ratio``, so that a better author counts more;
* ``clip``: the loss of a completion is -clip(s; 1 - DELTA, 1) s'^ALPHA A, where s is the geometric
  mean of its tokens' ratios to the policy that wrote it, and s' the clipped one without gradient
  (equation 59).

In the paper both nodes answer each question; here a group has one author, so its mean is that
author's. A learner makes one update in a round, so there is no step for clipping to narrow with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.optim.rl.advantages import STD_EPSILON
from shoal.optim.rl.completions import Completions
from shoal.optim.rl.losses import TokenLoss

CHANGES = ("baseline", "weight", "clip")
DELTA = 0.2
ALPHA = 1.0
RATIO_LIMITS = (0.1, 10.0)
WINDOW_ROUNDS = 5
SMALLEST = 1e-8
"""Capability of a node without any reward."""


class Capability:
    """Mean rewards of each node's groups in the last rounds, as one learner judges them."""

    def __init__(self) -> None:
        self._means: dict[int, deque[float]] = {}

    def add(self, author: int, groups: Sequence[Sequence[float]]) -> None:
        """Count the rewards of the groups that ``author`` wrote in a round."""
        given = [reward for group in groups for reward in group]
        if given:
            means = self._means.setdefault(author, deque(maxlen=WINDOW_ROUNDS))
            means.append(sum(given) / len(given))

    def ratio(self, author: int, learner: int) -> float:
        """Return the author's over the learner's; 1 for one of whom nothing is known."""
        if author not in self._means or learner not in self._means:
            return 1.0
        low, high = RATIO_LIMITS
        return min(max(self._of(author) / self._of(learner), low), high)

    def _of(self, author: int) -> float:
        means = self._means[author]
        return max(sum(means) / len(means), SMALLEST)


@dataclass(frozen=True)
class Correction:
    """The changes to an update from some groups."""

    changes: frozenset[str] = frozenset()
    ratios: tuple[float | None, ...] = ()
    """Of each group; None: the learner's own, for which nothing changes."""

    def advantages(self, plain: Tensor, rewards: Sequence[Sequence[float]]) -> Tensor:
        """Return the advantages of all completions, from those over each group's own mean."""
        if not self.changes:
            return plain
        changed = plain.clone()
        start = 0
        for ratio, given in zip(self.ratios, rewards, strict=True):
            part = slice(start, start + len(given))
            start += len(given)
            if ratio is None or min(given) == max(given):
                continue
            if "baseline" in self.changes:
                changed[part] += _raised(given, ratio)
            if "weight" in self.changes:
                changed[part] *= ratio
        return changed

    def loss(self, base: TokenLoss, rewards: Sequence[Sequence[float]]) -> TokenLoss:
        """Return ``base``, with `clipped_weight` for others' completions if that is a change."""
        if "clip" not in self.changes:
            return base
        foreign = [
            ratio is not None
            for ratio, given in zip(self.ratios, rewards, strict=True)
            for _ in given
        ]

        def mixed(batch: Completions) -> Tensor:
            others = torch.tensor(foreign, device=batch.new.device)[:, None]
            return torch.where(others, clipped_weight(batch), base(batch))

        return mixed


UNCHANGED = Correction()


def _raised(rewards: Sequence[float], ratio: float) -> float:
    """Return by how much the advantages rise if the baseline is the mean divided by ``ratio``.

    A baseline above 1, the largest reward, is none: the mean stays then.
    """
    values = torch.tensor(rewards, dtype=torch.float64)
    mean = float(values.mean())
    baseline = mean / ratio
    if baseline > 1:
        return 0.0
    return (mean - baseline) / (float(values.std(correction=0)) + STD_EPSILON)


def clipped_weight(batch: Completions, delta: float = DELTA, alpha: float = ALPHA) -> Tensor:
    """Return HACPO's loss of completions that another wrote, (B, T)."""
    held = batch.sequence_ratio().clamp(1 - delta, 1.0)
    loss = -held * held.detach().pow(alpha) * batch.gains
    return loss.expand_as(batch.new)
