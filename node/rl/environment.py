"""Environments: questions for a policy, and rewards of its answers, the same on every node.

An environment makes its questions from two numbers. A rollout on the network names only the
question that it answers; a receiver makes the question anew and judges the answers itself, so
nobody has to be trusted. Both methods must depend on their arguments (and the options of the
environment) alone, on every machine, and in every process.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from shoal.node.user_code import UserCodeError, calling

HELD_OUT = 2**62
"""Seed of the questions for evaluations: nobody trains on them."""

Option = int | float | str | bool


class EnvError(UserCodeError):
    """An environment cannot be loaded, or breaks its contract."""


@dataclass(frozen=True)
class Question:
    """A prompt, with the data that its environment needs for judging."""

    prompt: str
    answer: str | None = None
    """Right answer, if one is known: the warm start of the small policy shows it."""
    data: Any = field(default=None, compare=False)


@runtime_checkable
class Environment(Protocol):
    """Interface of a user's own environment (examples/add_env.py)."""

    version: str
    """To be changed whenever questions or rewards change: nodes learn from each other only if it is
    equal.
    """

    def question(self, seed: int, index: int) -> Question:
        """Return question number ``index`` of ``seed``: both at least 0, ``seed`` below 2^63,
        ``index`` at most 2^53.
        """
        ...

    def reward(self, question: Question, completion: str) -> float:
        """Return the reward of a completion, from 0 to 1.

        It comes from a stranger: never evaluate it, and never take long.
        """
        ...


class GuardedEnvironment:
    """The user's environment as Shoal calls it: by one thread at a time, though training and
    verification both ask it. What its methods raise, or return wrongly, is a UserCodeError.
    """

    def __init__(self, made: Environment, name: str) -> None:
        self._made = made
        self._lock = threading.Lock()
        self.version = made.version
        self.user_subject = f"Your environment {name!r}"

    def question(self, seed: int, index: int) -> Question:
        with self._lock, calling(self, "question()"):
            found = self._made.question(seed, index)
        if not isinstance(found, Question) or not isinstance(found.prompt, str):
            raise UserCodeError(
                f"{self.user_subject}: question() must return a Question with a text as its prompt."
            )
        return found

    def reward(self, question: Question, completion: str) -> float:
        with self._lock, calling(self, "reward()"):
            found = self._made.reward(question, completion)
        try:
            return float(found)
        except (TypeError, ValueError):
            raise UserCodeError(
                f"{self.user_subject}: reward() must return a number from 0 to 1, not "
                f"{found!r:.40}."
            ) from None


@dataclass(frozen=True)
class Env:
    """Environment with all that identifies it in a swarm."""

    label: str
    """Name; for a user's own environment without the folder, which is local."""
    config: bytes
    """Options as canonical JSON."""
    made: Environment

    def knows(self, label: str, version: str, config: bytes) -> bool:
        """Return whether a rollout of that environment answers questions of this one."""
        return (label, version, config) == (self.label, self.made.version, self.config)

    def rewards(self, question: Question, completions: Sequence[str]) -> tuple[float, ...]:
        """Return a reward for each completion. EnvError if one is no number from 0 to 1."""
        rewards: list[float] = []
        for completion in completions:
            reward = float(self.made.reward(question, completion))
            if not (math.isfinite(reward) and 0 <= reward <= 1):
                raise EnvError(
                    f"The environment {self.label!r} gave the reward {reward}: it must be a number "
                    "from 0 to 1."
                )
            rewards.append(reward)
        return tuple(rewards)


def canonical(options: Mapping[str, Option]) -> bytes:
    """Encode options such that equal ones give equal bytes."""
    return json.dumps(dict(options), sort_keys=True, separators=(",", ":")).encode()
