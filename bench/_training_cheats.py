"""A small text GPT in training, and ways to claim steps that were not done. For bench/training_audit.py and the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from shoal.node.task import Shard
from shoal.node.tasks.text import TextTask
from shoal.node.verify.training.audit import Kept
from shoal.node.verify.training.calibrate import stretches
from shoal.node.verify.training.material import TrainingTerms
from shoal.node.verify.training.replica import MODEL, Condition, Replica, weights_in
from shoal.swarm.manifest.outer import TrainSettings

LABEL = "text"
SHARD, OTHER = Shard(0, 4, 1), Shard(1, 4, 1)
SMALL = {"width": 32, "context": 32, "batch": 4}
Cheat = Callable[[Kept], Kept]


class World:
    """The task, the terms, and a replica to replay on. ``steps`` of a training run, 5 in a stretch."""

    def __init__(self, steps: int = 400, **options: int | float) -> None:
        self.options = {"max_bytes": 1 << 20, **SMALL, **options}
        self.terms = TrainingTerms(LABEL, TrainSettings(steps=steps, seed=1), dtypes=("float32", "bfloat16"))
        self.replica = self.replica_of()
        self._quick = self.replica_of(lr=1.1 * self.task().lr)

    def task(self, **options: int | float) -> TextTask:
        return TextTask(**{**self.options, **options})  # type: ignore[arg-type]

    def replica_of(self, **options: int | float) -> Replica:
        return Replica(self.task(**options), self.terms.train)

    def honest(self, shard: Shard = SHARD, many: int | None = None) -> Iterator[Kept]:
        return islice(stretches(self.task(), self.terms, shard), many)

    def done(self, kept: Kept, condition: Condition = nullcontext) -> Kept:
        """``kept`` as an honest prover under another condition has it."""
        return self._by(self.replica, kept, condition=condition)

    def _by(
        self, replica: Replica, kept: Kept, *, shard: Shard | None = None, fewer: int = 0, condition: Condition = nullcontext
    ) -> Kept:
        stretch = kept.stretch
        after = replica.replay(kept.state, shard or stretch.shard, stretch.first, stretch.steps - fewer, condition)
        return replace(kept, after=tuple(after))

    def cheats(self, copied: Iterator[Kept], condition: Condition = nullcontext) -> dict[str, Cheat]:
        """``copied``: the stretches of another peer, in step with those that are claimed."""

        known: dict[int, Kept] = {}

        def honest(kept: Kept) -> Kept:
            first = kept.stretch.first
            if first not in known:
                known[first] = kept if condition is nullcontext else self.done(kept, condition)
            return known[first]

        return {
            "4 of 5 steps": lambda kept: self._by(self.replica, kept, fewer=1, condition=condition),
            "1 of 5 steps": lambda kept: self._by(self.replica, kept, fewer=4, condition=condition),
            "another shard": lambda kept: self._by(self.replica, kept, shard=OTHER, condition=condition),
            "learning rate + 10 %": lambda kept: self._by(self._quick, kept, condition=condition),
            "1 % noise on the change": lambda kept: noisy(honest(kept), 0.01),
            "10 % noise on the change": lambda kept: noisy(honest(kept), 0.1),
            "another peer's change": lambda kept: with_change_of(kept, next(copied)),
            "another peer's weights": lambda kept: replace(kept, after=next(copied).after),
            "change + 5 %": lambda kept: moved(honest(kept), lambda change: 1.05 * change),
            "nothing": lambda kept: moved(honest(kept), lambda change: 1e-3 * change),
        }


def changes(kept: Kept) -> list[tuple[Tensor, Tensor]]:
    """Of each parameter, its value before and what was added to it."""
    before = weights_in(kept.state, kept.names, MODEL)
    return [(old, new - old) for old, new in zip(before, kept.after, strict=True)]


def moved(kept: Kept, change: Callable[[Tensor], Tensor]) -> Kept:
    return replace(kept, after=tuple(old + change(step) for old, step in changes(kept)))


def noisy(kept: Kept, share: float) -> Kept:
    """Normal noise of this share of the root mean square of each tensor's change."""
    random = torch.Generator().manual_seed(kept.stretch.first)
    return moved(kept, lambda step: step + share * step.square().mean().sqrt() * torch.randn(step.shape, generator=random))


def with_change_of(kept: Kept, other: Kept) -> Kept:
    before = weights_in(kept.state, kept.names, MODEL)
    return replace(kept, after=tuple(old + step for old, (_, step) in zip(before, changes(other), strict=True)))
