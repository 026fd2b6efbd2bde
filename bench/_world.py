"""What bench/sapo.py trains: the protocol of a policy, and the questions of a world."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.optim.rl import TokenLoss


@dataclass(frozen=True)
class Completion:
    """What a policy wrote."""

    text: str
    log_probs: tuple[float, ...]
    """Of its tokens, when it was written."""


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
        """Of the node's answers to all questions, in [0, 1]; an estimate will do but for the ``last`` time."""
        ...


@dataclass(frozen=True)
class World:
    """The questions are numbers; policies begin without knowing the answers."""

    right: tuple[str, ...]
    wrong: tuple[str, ...]
    policies: tuple[Policy, ...]


@dataclass(frozen=True)
class Settings:
    """What a world is made with; ``rate`` and ``overlap`` are the linear policy's."""

    nodes: int
    loss: TokenLoss
    rate: float
    overlap: float
