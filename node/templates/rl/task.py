"""Reinforcement learning in an environment of your own: here, to write a word backwards.

Everybody who takes part has this file. A rollout says which question it answers by two numbers; who receives it makes the same
question of them and judges the answers itself, so nobody has to be believed.
"""

from __future__ import annotations

import hashlib
import random

from shoal.node.rl.environment import Question


class Reverse:
    """Words of ``length`` out of the first ``letters`` letters."""

    version = "1"
    """Change it whenever questions or rewards change: nodes learn from each other only if it is equal."""

    def __init__(self, length: int = 3, letters: int = 6) -> None:
        self.length, self.letters = length, "abcdefghijklmnopqrstuvwxyz"[:letters]

    def question(self, seed: int, index: int) -> Question:
        """The same word on every machine: it depends on the two numbers alone."""
        draw = random.Random(hashlib.sha256(f"reverse:{seed}:{index}".encode()).digest())
        word = "".join(draw.choices(self.letters, k=self.length))
        return Question(f"backwards: {word}", word[::-1])

    def reward(self, question: Question, completion: str) -> float:
        """The share of letters in their places, from 0 to 1; nothing for an answer of another length."""
        answer = question.answer or ""
        if len(completion) != len(answer):
            return 0.0
        return sum(a == b for a, b in zip(completion, answer, strict=True)) / len(answer)
