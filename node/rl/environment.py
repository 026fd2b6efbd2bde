"""Environments: questions for a policy, and rewards of its answers, the same on every node; and the
interface of policies.

An environment makes its questions from two numbers. A rollout on the network names only the
question that it answers; a receiver makes the question anew and judges the answers itself, so
nobody has to be trusted. Both methods must depend on their arguments (and the options of the
environment) alone, on every machine, and in every process.

Nodes of one swarm may have different policies. They share text; token ids and log-probabilities are
of use only to nodes with the same tokenizer.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import inspect
import io
import json
import logging
import math
import random
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from shoal.node.console import require
from shoal.node.user_code import UserCodeError, calling
from shoal.optim.device import to_device
from shoal.swarm.errors import ShoalError
from shoal.swarm.topics.rollout import Finish

HELD_OUT = 2**62
"""Seed of the questions for evaluations: nobody trains on them."""

Option = int | float | str | bool


class EnvError(UserCodeError):
    """Environment that cannot be loaded, or breaks its contract."""


@dataclass(frozen=True)
class Question:
    """Question, with the data that its environment needs for judging."""

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
    """The user's environment as Shoal calls it: what its methods raise, or return wrongly, is a
    UserCodeError.
    """

    def __init__(self, made: Environment, name: str) -> None:
        self._made = made
        self.version = made.version
        self.user_subject = f"Your environment {name!r}"

    def question(self, seed: int, index: int) -> Question:
        with calling(self, "question()"):
            found = self._made.question(seed, index)
        if not isinstance(found, Question) or not isinstance(found.prompt, str):
            raise UserCodeError(
                f"{self.user_subject}: question() must return a Question with a text as its prompt."
            )
        return found

    def reward(self, question: Question, completion: str) -> float:
        with calling(self, "reward()"):
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
        found = tuple(float(self.made.reward(question, completion)) for completion in completions)
        for reward in found:
            if not (math.isfinite(reward) and 0 <= reward <= 1):
                raise EnvError(
                    f"The environment {self.label!r} gave the reward {reward}: it must be a number "
                    "from 0 to 1."
                )
        return found


def canonical(options: Mapping[str, Option]) -> bytes:
    """Encode options such that equal ones give equal bytes."""
    return json.dumps(dict(options), sort_keys=True, separators=(",", ":")).encode()


# Built-in environment: small rules on short strings, which a small model can learn for all strings.
#
# reverse: dbca acbd largest: dbca d count: abca 2 (how often the first letter comes) last: dbca a
# sorted: dbca abcd

RULES: dict[str, Callable[[str], str]] = {
    "reverse": lambda word: word[::-1],
    "last": lambda word: word[-1],
    "largest": max,
    "sorted": lambda word: "".join(sorted(word)),
    "count": lambda word: str(word.count(word[0])),
}


class Strings:
    """Questions of ``families`` (separated by commas) on words of ``shortest`` to ``longest`` of
    the first ``letters`` letters.

    The reward is 1 for exactly the right answer, else 0.
    """

    version = "1"

    def __init__(
        self,
        families: str = "reverse,last,largest,sorted,count",
        letters: int = 6,
        shortest: int = 3,
        longest: int = 4,
    ) -> None:
        self.families = tuple(families.split(","))
        unknown = [name for name in self.families if name not in RULES]
        if unknown:
            raise EnvError(
                f"There is no family {unknown[0]!r} of strings: choose of {', '.join(RULES)}."
            )
        if not (1 <= letters <= 26 and 1 <= shortest <= longest <= 64):
            raise EnvError(
                "The environment 'strings' needs 1 to 26 letters, and words from shortest to "
                "longest within 1 to 64."
            )
        self.letters = "abcdefghijklmnopqrstuvwxyz"[:letters]
        self.lengths = (shortest, longest)

    def question(self, seed: int, index: int) -> Question:
        # Hashed: Python's generator starts alike from seeds that are near each other.
        draw = random.Random(hashlib.sha256(f"strings/1:{seed}:{index}".encode()).digest())
        family = draw.choice(self.families)
        word = "".join(draw.choices(self.letters, k=draw.randint(*self.lengths)))
        return Question(f"{family}: {word}", RULES[family](word))

    def reward(self, question: Question, completion: str) -> float:
        return float(completion == question.answer)


# Questions from the optional package reasoning-gym: any of its families, or ``sapo9``, the nine of
# SAPO's experiment.
#
# Families judge differently, some in ways that a swarm cannot use:
#
# * Some evaluate the answer as Python (binary_matrix, one of the nine, calls ``eval`` on it), or
#   parse it with sympy, which does the same. An answer comes from a stranger here, so these
#   families are judged by comparison with the known answer instead.
# * Some give a few hundredths to any answer. An advantage is relative to the group, so a group of
#   wrong answers would teach differences between them. Credits below ``LEAST`` count as 0.
# * propositional_logic has no single answer; its metadata hold an example. bf prints dots to
#   stdout.

log = logging.getLogger(__name__)

NINE = (
    "base_conversion",
    "basic_arithmetic",
    "arc_1d",
    "bf",
    "propositional_logic",
    "fraction_simplification",
    "decimal_arithmetic",
    "calendar_arithmetic",
    "binary_matrix",
)
# stdout is the process's: of two threads that redirect it in turn the last puts back what the other
# had
_QUIET = threading.Lock()
LEAST = 0.1
EVALUATES = re.compile(
    r"\b(eval|exec|compile|literal_eval|sympify|simplify|parse_expr)\(|\bimport (sympy)|\bfrom "
    r"(sympy)"
)


class Gym:
    """``family`` of reasoning-gym, with options of its configuration such as ``max_digits``."""

    def __init__(self, family: str, **options: Option) -> None:
        require(
            EnvError,
            f"The environment {family!r}",
            "reasoning_gym",
            extra="rl",
            otherwise="choose strings",
        )
        from reasoning_gym.factory import DATASETS

        self.version = f"reasoning-gym {importlib.metadata.version('reasoning-gym')}, 1"
        self._families = NINE if family == "sapo9" else (family,)
        if family == "sapo9" and options:
            raise EnvError(
                "The environment 'sapo9' takes no options: each of its families has its own "
                "defaults."
            )
        unknown = [name for name in self._families if name not in DATASETS]
        if unknown:
            raise EnvError(
                f"There is no environment {unknown[0]!r}: choose strings, sapo9, a family of "
                "reasoning-gym, or FILE.py:CLASS."
            )
        self._made = {name: DATASETS[name] for name in self._families}
        self._compared = {name for name, (dataset, _) in self._made.items() if _evaluates(dataset)}
        self._options = options
        for name in self._families:
            self._dataset(name, 0)  # here, so that a wrong option shows

    def _dataset(self, family: str, seed: int) -> Any:
        dataset, config = self._made[family]
        return dataset(config=config(**{**self._options, "seed": seed, "size": 1}))

    def question(self, seed: int, index: int) -> Question:
        draw = hashlib.sha256(f"gym/1:{seed}:{index}".encode()).digest()
        family = self._families[int.from_bytes(draw[:8], "big") % len(self._families)]
        with _QUIET, contextlib.redirect_stdout(io.StringIO()):
            dataset = self._dataset(family, int.from_bytes(draw[8:12], "big"))
            item = dataset[0]
        answer = (
            item["answer"] if item["answer"] is not None else item["metadata"].get("example_answer")
        )
        return Question(
            str(item["question"]), None if answer is None else str(answer), (family, dataset, item)
        )

    def reward(self, question: Question, completion: str) -> float:
        """Return the family's score of ``completion``; 0 if it cannot read it."""
        family, dataset, item = question.data
        if family in self._compared:
            return float(
                question.answer is not None and completion.split() == question.answer.split()
            )
        try:
            with _QUIET, contextlib.redirect_stdout(io.StringIO()):
                credit = float(dataset.score_answer(completion, item))
        except Exception as error:  # they parse what a policy wrote, and fail at it in many ways
            log.debug("%s could not judge an answer: %s", family, error)
            return 0.0
        return min(credit, 1.0) if credit >= LEAST else 0.0


def _evaluates(dataset: type[Any]) -> bool:
    """Return whether judging may evaluate the answer.

    Families without a judgement of their own only compare.
    """
    from reasoning_gym.dataset import ProceduralDataset

    if dataset.score_answer is ProceduralDataset.score_answer:
        return False
    source = inspect.getsource(sys.modules[dataset.__module__])
    found = {name for names in EVALUATES.findall(source) for name in names if name}
    # propositional_logic has a parser of its own with the name of sympy's.
    return any(f"def {name}(" not in source for name in found)


LOOK = 8
BELOW = 1 - 2**-20
"""Keeps what is searched below the sum of all probabilities, whatever is rounded, so a token that
cannot come is never drawn.
"""
Choose = Callable[[Tensor], Tensor]
"""Maps the logits (B, V) of one step to the token of each row, int64 (B,)."""


class PolicyError(ShoalError):
    """Policy that cannot be made."""


@dataclass(frozen=True)
class Completion:
    """Completion of a prompt by a policy."""

    text: str
    tokens: tuple[int, ...]
    """Tokens as drawn, with the end token if it came."""
    log_probs: tuple[float, ...]
    """Natural log-probability of each token under the distribution of its draw, with temperature.
    """
    finish: Finish
    """``stop`` if it ended by itself, ``length`` if it was cut off."""


class Policy(Protocol):
    """Interface of a model to reinforcement learning."""

    tokenizer: str
    """Hex SHA-256 that is equal for policies whose token ids mean the same."""
    lr: float
    """Learning rate for AdamW that suits the model."""
    loss: str
    """Member of ``shoal.optim.rl.LOSSES`` that suits it."""
    max_tokens: int
    """Usual length of completions of this policy."""
    vocabulary: int
    """Bound of token ids."""

    @property
    def module(self) -> nn.Module:
        """Trained module; it may be moved to another device, and the policy computes where its
        parameters are.
        """
        ...

    def generate(
        self,
        prompts: Sequence[str],
        count: int,
        *,
        temperature: float,
        max_tokens: int,
        seed: int,
        choose: Choose | None = None,
    ) -> list[list[Completion]]:
        """Write ``count`` completions of each prompt, at most ``max_tokens`` tokens long; greedy if
        ``temperature`` is 0.

        The same arguments and weights give the same completions on the same machine (CPU).
        ``choose`` replaces the draw with ``seed`` and is called once for each step, also for rows
        that have ended; up to 16 prompts with the ``count`` 1 are passed all at once, in their
        order if they are equal.
        """
        ...

    def ends(self, token: int) -> bool: ...

    def encode(self, completion: str, ended: bool) -> list[int]:
        """Return the token ids of any completion, with the end token if it ``ended`` by itself."""
        ...

    def log_probs(
        self, prompts: Sequence[str], completions: Sequence[Sequence[int]], temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return the log-probability of each token of each completion, float (B, T) with gradient,
        and bool (B, T), its mask.

        Prompt number i belongs to completion number i. T is the length of the longest completion,
        the others are padded.
        """
        ...

    def logits(
        self, prompts: Sequence[str], completions: Sequence[Sequence[int]]
    ) -> tuple[Tensor, Tensor]:
        """Return the logits of each token of each completion, floating (B, T, V), before the
        temperature, and bool (B, T), its mask.

        They are the last T positions of one call of the module; the rest is as for ``log_probs``.
        """
        ...


def pad(
    rows: Sequence[Sequence[int]], filler: int, *, left: bool, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Pad rows of token ids to one int64 (B, T), T at least 1; also return bool (B, T), False at
    padding.
    """
    longest = max(1, *map(len, rows))
    tokens = torch.full((len(rows), longest), filler, dtype=torch.int64, device="cpu")
    mask = torch.zeros((len(rows), longest), dtype=torch.bool, device="cpu")
    for number, row in enumerate(rows):
        place = slice(longest - len(row), longest) if left else slice(0, len(row))
        tokens[number, place] = torch.tensor(list(row), dtype=torch.int64, device="cpu")
        mask[number, place] = True
    return tokens.to(device), mask.to(device)


def chances(generator: torch.Generator, tokens: int, rows: int, device: torch.device) -> Tensor:
    """Return uniform numbers (``tokens``, ``rows``) by which `draw` draws: the same for a seed,
    whatever the device is.
    """
    return to_device([torch.rand(tokens, rows, generator=generator, device="cpu")], device)[0]


def draw(
    logits: Tensor, temperature: float, chance: Tensor, choose: Choose | None = None
) -> tuple[Tensor, Tensor]:
    """Draw a token of each row of logits (B, V); return it and its log-probability, both (B,).

    ``temperature`` 0: the likeliest.

    Drawn where the logits are, which nobody waits for: the first token whose cumulative probability
    is above ``chance``, (B,) in [0, 1). Or by ``choose``.
    """
    logs = (logits.float() / (temperature or 1.0)).log_softmax(-1)
    if choose is not None:
        chosen = choose(logits).to(logits.device)
    elif temperature == 0:
        chosen = logs.argmax(-1)
    else:
        sums = logs.exp().cumsum(-1)
        below = chance * sums[:, -1] * BELOW
        chosen = torch.searchsorted(sums, below[:, None], right=True)[:, 0].clamp(
            max=logits.shape[1] - 1
        )  # of NaN it is too large
    return chosen, logs.gather(-1, chosen[:, None])[:, 0]


def looks(token: int, device: torch.device) -> bool:
    """Return whether to look, after ``token`` tokens, if all rows have ended: rarely where that
    waits for an accelerator.
    """
    return device.type == "cpu" or token % LOOK == 0


def drawn(ids: list[Tensor], logs: list[Tensor]) -> Iterator[tuple[list[int], list[float]]]:
    """Yield each row's tokens and their log-probabilities, as `draw` returned them.

    PolicyError if these are not finite.
    """
    found = torch.stack(logs, 1).cpu()
    if not bool(found.isfinite().all()):
        raise PolicyError(
            "The policy's probabilities are not finite any more: lower its learning rate, or clip "
            "its gradients."
        )
    yield from zip(torch.stack(ids, 1).tolist(), found.tolist(), strict=True)
