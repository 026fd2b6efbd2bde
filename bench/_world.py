"""What bench/sapo.py trains: the protocol of a policy, and the questions of a world."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

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

    def learn(self, groups: Sequence[Group], rewards: Sequence[Sequence[float]]) -> None:
        """One update; ``rewards`` are those of each group's completions."""
        ...

    def accuracy(self, last: bool = False) -> float:
        """Of the node's answers to all questions, in [0, 1]; an estimate will do but for the
        ``last`` time.
        """
        ...


@dataclass(frozen=True)
class World:
    """The questions are numbers; policies begin without knowing the answers."""

    right: tuple[str, ...]
    wrong: tuple[str, ...]
    policies: Sequence[Policy]
    judge: Callable[[int, Sequence[Completion]], tuple[float, ...]] | None = None
    """Rewards of completions of a question; None: 1 for the answer, else 0."""


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
    overlap: float = 1.0
    """linear: length of the shared features."""
    temperature: float = 1.0
    env: str = "families"
    base: Path = Path()
    """The folder of the model that all nodes begin with, if it learnt from solved questions."""
    solved: int = 0
    """Batches of them."""
    device: str = "cpu"
