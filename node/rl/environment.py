"""What a policy is asked, and how its answers are judged: the same on every node, so that nobody's word has to be taken.

An environment makes its questions from two numbers. A rollout that travels says only which question it answers; whoever receives
it makes the question anew and judges the answers itself. So both methods must depend on their arguments (and the options that the
environment was made with) alone, on every machine, and in every process.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from shoal.swarm.errors import ShoalError

HELD_OUT = 2**62
"""Questions of this seed are asked in evaluations only: nobody trains on them."""

Option = int | float | str | bool


class EnvError(ShoalError):
    """An environment cannot be loaded, or does not do what it promises."""


@dataclass(frozen=True)
class Question:
    """What is asked, and what its environment needs for judging."""

    prompt: str
    answer: str | None = None
    """A right answer, if one is known: the warm start of the small policy shows it."""
    data: Any = field(default=None, compare=False)


@runtime_checkable
class Environment(Protocol):
    """What a user writes to have a policy learn something of his own (examples/add_env.py)."""

    version: str
    """To be changed whenever questions or rewards change: nodes learn from each other only if it is equal."""

    def question(self, seed: int, index: int) -> Question:
        """The question number ``index`` of ``seed``: both at least 0, ``seed`` below 2^63, ``index`` at most 2^53."""
        ...

    def reward(self, question: Question, completion: str) -> float:
        """How good the completion is, from 0 to 1. It comes from a stranger: never evaluate it, and never take long."""
        ...


@dataclass(frozen=True)
class Env:
    """An environment with all that identifies it in a swarm."""

    label: str
    """Its name: for one's own without the folder, which is each machine's own affair."""
    config: bytes
    """Its options as canonical JSON."""
    made: Environment

    def knows(self, label: str, version: str, config: bytes) -> bool:
        """Whether a rollout of that environment answers questions of this one."""
        return (label, version, config) == (self.label, self.made.version, self.config)

    def rewards(self, question: Question, completions: Sequence[str]) -> tuple[float, ...]:
        """One per completion. EnvError if one is no number from 0 to 1, or the environment fails at it."""
        try:
            found = tuple(float(self.made.reward(question, completion)) for completion in completions)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise EnvError(f"The environment {self.label!r} fails to judge an answer ({why}): mend it.") from error
        for reward in found:
            if not (math.isfinite(reward) and 0 <= reward <= 1):
                raise EnvError(f"The environment {self.label!r} gave the reward {reward}: it must be a number from 0 to 1.")
        return found


def canonical(options: Mapping[str, Option]) -> bytes:
    """Equal options are equal bytes."""
    return json.dumps(dict(options), sort_keys=True, separators=(",", ":")).encode()
