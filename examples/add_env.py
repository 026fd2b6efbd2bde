"""A custom environment: sums of two numbers.

    shoal demo --task rl --env examples/add_env.py:Add --peers 2 --rounds 20
    shoal up --task rl --env examples/add_env.py:Add

All peers have this file. A rollout names its question by two numbers; a receiver gets the same
question from ``question`` and recomputes the rewards by ``reward``, so no peer has to be trusted.
"""

import hashlib
import random

from shoal.node.rl.environment import Question


class Add:
    """Sums of two numbers up to ``largest``, an option: --option largest=99."""

    version = "1"

    def __init__(self, largest: int = 30) -> None:
        self.largest = largest

    def question(self, seed: int, index: int) -> Question:
        """Return the question of these numbers, the same on every machine."""
        draw = random.Random(hashlib.sha256(f"add:{seed}:{index}".encode()).digest())
        a, b = draw.randint(0, self.largest), draw.randint(0, self.largest)
        return Question(f"{a} + {b}", str(a + b))

    def reward(self, question: Question, completion: str) -> float:
        """Return 1 for exactly the right sum, else 0."""
        return float(completion == question.answer)
