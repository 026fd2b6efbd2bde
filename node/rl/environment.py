"""What a policy is asked, and how its answers are judged: the same on every node, so that nobody's word has to be taken.

An environment makes its questions from two numbers. A rollout that travels says only which question it answers; whoever receives
it makes the question anew and judges the answers itself. So both methods must depend on their arguments (and the options that the
environment was made with) alone, on every machine, and in every process.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from node.hooks import HookError, find_class
from node.rl.settings import env_label
from swarm.errors import ShoalError

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
        """One per completion. EnvError if one is no number from 0 to 1; whatever the environment raises besides."""
        found = tuple(float(self.made.reward(question, completion)) for completion in completions)
        for reward in found:
            if not (math.isfinite(reward) and 0 <= reward <= 1):
                raise EnvError(f"The environment {self.label!r} gave the reward {reward}: it must be a number from 0 to 1.")
        return found


def canonical(options: Mapping[str, Option]) -> bytes:
    """Equal options are equal bytes."""
    return json.dumps(dict(options), sort_keys=True, separators=(",", ":")).encode()


def _built_in(spec: str) -> Callable[..., Environment] | None:
    if spec == "strings":
        from node.rl.strings import Strings

        return Strings
    if re.fullmatch(r"[a-z0-9_]{1,64}", spec):
        from node.rl.gym import Gym

        return lambda **options: Gym(spec, **options)
    return None


def load_env(spec: str, options: Mapping[str, Option]) -> Env:
    """The environment that ``spec`` names: ``strings``, a family of reasoning-gym, ``sapo9``, ``module:Class`` or ``file.py:Class``.

    Raises EnvError or HookError.
    """
    made_by = _built_in(spec) or find_class(spec, "environment")
    try:
        made = made_by(**options)
    except ShoalError:
        raise
    except Exception as error:
        takes = _options_of(made_by)
        raise EnvError(
            f"The environment {spec!r} cannot be made ({type(error).__name__}: {error}): correct its options{takes}."
        ) from error
    if not isinstance(made, Environment) or not isinstance(made.version, str) or not 0 < len(made.version) <= 128:
        raise HookError(f"The environment {spec!r} needs version, question(seed, index) and reward(question, completion).")
    env = Env(env_label(spec), canonical(options), made)
    if not re.fullmatch(r"[A-Za-z0-9_.:+-]{1,128}", env.label) or len(env.config) > 4096:
        raise EnvError(f"The environment {spec!r} has too long a name or too long options: shorten them.")
    first = _try(env)
    if not isinstance(first, Question) or not isinstance(first.prompt, str):
        raise HookError(f"question(seed, index) of the environment {spec!r} must return a Question with a text as its prompt.")
    return env


def _try(env: Env) -> Question:
    """The first held-out question, judged once, so that a fault shows before anything is trained."""
    try:
        question = env.made.question(HELD_OUT, 0)
        env.rewards(question, [question.answer or ""])
        return question
    except ShoalError:
        raise
    except Exception as error:
        raise EnvError(
            f"The environment {env.label!r} fails at its first question ({type(error).__name__}: {error}): mend it."
        ) from error


def _options_of(made_by: Callable[..., Environment]) -> str:
    names = [p.name for p in inspect.signature(made_by).parameters.values() if p.kind is not p.VAR_KEYWORD]
    return f", which are {', '.join(names)}" if names else ""
