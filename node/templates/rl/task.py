"""Reinforcement learning in an environment of your own: here, writing a word backwards.

Every node has this file. A rollout names its question by two numbers; the node that receives it
computes the same question from them and judges the answers itself, so no node has to trust another.
"""

from __future__ import annotations

import hashlib
import random

from shoal.node.rl.environment import Question


class Reverse:
    """Environment with words of ``length`` of the first ``letters`` letters."""

    version = "1"
    """Change it whenever questions or rewards change: nodes learn from each other only if it is
    equal.
    """

    def __init__(self, length: int = 3, letters: int = 6) -> None:
        self.length = length
        self.letters = "abcdefghijklmnopqrstuvwxyz"[:letters]

    def question(self, seed: int, index: int) -> Question:
        """Return the question.

        It depends on the two numbers only, so it is the same on every machine.
        """
        draw = random.Random(hashlib.sha256(f"reverse:{seed}:{index}".encode()).digest())
        word = "".join(draw.choices(self.letters, k=self.length))
        return Question(f"backwards: {word}", word[::-1])

    def reward(self, question: Question, completion: str) -> float:
        """Return the share of letters in their places, from 0 to 1; 0 for an answer of another
        length.
        """
        answer = question.answer or ""
        if len(completion) != len(answer):
            return 0.0
        return sum(a == b for a, b in zip(completion, answer, strict=True)) / len(answer)
