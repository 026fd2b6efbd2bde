"""An environment of one's own: sums of two numbers.

    shoal demo --task rl --env examples/add_env.py:Add --peers 2 --rounds 20
    shoal up --task rl --env examples/add_env.py:Add

Everybody who takes part has this file. A rollout says which question it answers by two numbers; who receives it asks ``question``
for the same one and judges the answers by ``reward``, so nobody has to be believed.
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
        """The same two numbers on every machine."""
        draw = random.Random(hashlib.sha256(f"add:{seed}:{index}".encode()).digest())
        a, b = draw.randint(0, self.largest), draw.randint(0, self.largest)
        return Question(f"{a} + {b}", str(a + b))

    def reward(self, question: Question, completion: str) -> float:
        """1 for the right sum and nothing else."""
        return float(completion == question.answer)
