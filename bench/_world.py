"""What bench/sapo.py trains: the protocol of a policy, and the questions of a world."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench._hacpo import UNCHANGED, Correction
from shoal.optim.rl.losses import Per, TokenLoss
from shoal.swarm.topics.rollout import Finish


@dataclass(frozen=True)
class Completion:
    """What a policy wrote."""

    text: str
    log_probs: tuple[float, ...]
    """Of its tokens, when it was written."""
    tokens: tuple[int, ...] = ()
    finish: Finish = "stop"


@dataclass(frozen=True)
class Group:
    """A question with its completions, and what the author says the answer is."""

    question: int
    answer: str
    completions: tuple[Completion, ...]


class Policy(Protocol):
    """What can be trained here; each node has one."""

    def complete(self, questions: Sequence[int], count: int) -> list[tuple[Completion, ...]]:
        """Sample so many completions of each question."""
        ...

    def learn(
        self,
        groups: Sequence[Group],
        rewards: Sequence[Sequence[float]],
        correction: Correction = UNCHANGED,
    ) -> None:
        """One update; ``rewards`` are those of each group's completions."""
        ...

    def accuracy(self, last: bool = False) -> float:
        """Of the node's answers to all questions, in [0, 1]; an estimate will do but for the
        ``last`` time.
        """
        ...


UNLIKE = {"size": ("large", "small"), "speed": ("fast", "slow"), "families": ("even", "odd")}
"""In what nodes differ, and what the two kinds are called: nodes 0, 2, ... and nodes 1, 3, ...

size: the second has a smaller policy. speed: it writes a quarter of the first's groups in a round.
families: one asks questions of even families, the other of odd ones, and both are examined in all.
"""
SLOWER = 4


def share_of(node: int, share: tuple[int, int], unlike: str | None) -> tuple[int, int]:
    """Return how many own and foreign groups ``node`` learns from in a round.

    A slow node takes foreign groups in place of those that it does not write, if any are shared.
    """
    own, foreign = share
    if unlike != "speed" or node % 2 == 0:
        return share
    slow = max(own // SLOWER, 1)
    if foreign == 0:
        return slow, 0
    return slow, own + foreign - slow


def questions_of(node: int, world: World, unlike: str | None) -> Sequence[int]:
    """Return the questions that ``node`` asks."""
    every = range(len(world.right))
    if unlike != "families" or world.families is None:
        return every
    families = world.families
    return [question for question in every if families[question] % 2 == node % 2]


@dataclass(frozen=True)
class World:
    """The questions are numbers; policies begin without knowing the answers."""

    right: tuple[str, ...]
    wrong: tuple[str, ...]
    policies: Sequence[Policy]
    judge: Callable[[int, Sequence[Completion]], tuple[float, ...]] | None = None
    """Rewards of completions of a question; None: 1 for the answer, else 0."""
    families: tuple[int, ...] | None = None
    """Of each question, where nodes ask questions of different ones."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a world is made with."""

    policy: str
    nodes: int
    loss: TokenLoss
    per: Per = "token"
    """What the mean of the loss is over."""
    rate: float | None
    """Learning rate; None: the policy's own."""
    unlike: str | None = None
    """In what the nodes differ (`UNLIKE`)."""
    overlap: float = 1.0
    """linear: length of the shared features."""
    temperature: float = 1.0
    env: str = "families"
    base: Path = Path()
    """The folder of the model that all nodes begin with, if it learnt from solved questions."""
    solved: int = 0
    """Batches of them."""
    device: str = "cpu"
