"""Environments of the optional package reasoning-gym: any of its families, or ``sapo9``, the nine
of SAPO's experiment (2509.08721).

Families judge differently, some in ways that a swarm cannot use:

* Some evaluate the answer as Python (binary_matrix, one of the nine, calls ``eval`` on it), or
  parse it with sympy, which does the same. An answer comes from a stranger here, so these families
  are judged by comparison with the known answer instead.
* Some take a time without bound for a short answer. What does not match `JUDGED` is worth 0.
* Some give a few hundredths to any answer. An advantage is relative to the group, so a group of
  wrong answers would teach differences between them. Credits below `LEAST_CREDIT` count as 0.
* propositional_logic has no single answer; its metadata hold an example. bf prints dots to stdout.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import inspect
import io
import logging
import re
import sys
import threading
from typing import Any

from shoal.node.packages import require
from shoal.node.rl.environment import EnvError, Option, Question

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
LEAST_CREDIT = 0.1
"""Of a family's score, from 0 to 1: less counts as 0."""
_STDOUT = threading.Lock()
"""stdout is the process's: of two threads that redirect it in turn the last puts back what the
other had.
"""
EVALUATES = re.compile(
    r"\b(eval|exec|compile|literal_eval|sympify|simplify|parse_expr)\(|\bimport (sympy)|\bfrom "
    r"(sympy)"
)
"""What the source of a family has that may evaluate an answer."""

_OPERAND = r"[¬(\s]{0,8}[A-Z][)\s]{0,8}"
JUDGED = {
    # It takes the digits of an exponent for a power to compute.
    "coin_flip": re.compile(r"[0-9.,/ ]+(e-?[0-9]{1,2})?"),
    # It tries all truth values of the names in an answer: eight at most.
    "propositional_logic": re.compile(rf"{_OPERAND}([∧∨→↔]{_OPERAND}){{0,7}}"),
    # It moves a car by single places.
    "rush_hour": re.compile(r"([A-Z][+-][0-9]\s*){1,200}"),
}
"""Form of the answers, without space around them, that these families may judge: each of their
known answers has it.
"""


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

        self.version = f"reasoning-gym {importlib.metadata.version('reasoning-gym')}, 2"
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
        # Here, so that a wrong option shows.
        for name in self._families:
            self._dataset(name, 0)

    def _dataset(self, family: str, seed: int) -> Any:
        dataset, config = self._made[family]
        return dataset(config=config(**{**self._options, "seed": seed, "size": 1}))

    def question(self, seed: int, index: int) -> Question:
        draw = hashlib.sha256(f"gym/1:{seed}:{index}".encode()).digest()
        family = self._families[int.from_bytes(draw[:8], "big") % len(self._families)]
        with _STDOUT, contextlib.redirect_stdout(io.StringIO()):
            dataset = self._dataset(family, int.from_bytes(draw[8:12], "big"))
            item = dataset[0]
        answer = item["answer"]
        if answer is None:
            answer = item["metadata"].get("example_answer")
        if answer is not None:
            answer = str(answer)
        return Question(str(item["question"]), answer, (family, dataset, item))

    def reward(self, question: Question, completion: str) -> float:
        """Return the family's score of ``completion``; 0 if it cannot read it."""
        family, dataset, item = question.data
        if family in self._compared:
            if question.answer is None:
                return 0.0
            return float(completion.split() == question.answer.split())
        form = JUDGED.get(family)
        if form is not None and form.fullmatch(completion.strip()) is None:
            return 0.0
        try:
            with _STDOUT, contextlib.redirect_stdout(io.StringIO()):
                credit = float(dataset.score_answer(completion, item))
        # Families parse what a policy wrote, and fail at it in many ways.
        except Exception as error:
            log.debug("%s could not judge an answer: %s", family, error)
            return 0.0
        return min(credit, 1.0) if credit >= LEAST_CREDIT else 0.0


def _evaluates(dataset: type[Any]) -> bool:
    """Return whether judging may evaluate the answer.

    Families without a judgement of their own only compare.
    """
    from reasoning_gym.dataset import ProceduralDataset

    if dataset.score_answer is ProceduralDataset.score_answer:
        return False
    source = inspect.getsource(sys.modules[dataset.__module__])
    for names in EVALUATES.findall(source):
        name = "".join(names)
        # propositional_logic has a parser of its own with the name of sympy's.
        if f"def {name}(" not in source:
            return True
    return False
