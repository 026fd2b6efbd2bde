"""The built-in environment ``strings``: small rules on short strings, which a small model can learn
for all strings.

    question          answer
    reverse: dbca     acbd
    last: dbca        a
    largest: dbca     d
    sorted: dbca      abcd
    count: abca       2         how often the first letter comes
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable

from shoal.node.rl.environment import EnvError, Question

MAX_WORD_LETTERS = 64
ALPHABET = "abcdefghijklmnopqrstuvwxyz"

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
        if not (1 <= letters <= len(ALPHABET) and 1 <= shortest <= longest <= MAX_WORD_LETTERS):
            raise EnvError(
                "The environment 'strings' needs 1 to 26 letters, and words from shortest to "
                "longest within 1 to 64."
            )
        self.letters = ALPHABET[:letters]
        self.lengths = (shortest, longest)

    def question(self, seed: int, index: int) -> Question:
        # Hashed: Python's generator starts alike from seeds that are near each other.
        draw = random.Random(hashlib.sha256(f"strings/1:{seed}:{index}".encode()).digest())
        family = draw.choice(self.families)
        word = "".join(draw.choices(self.letters, k=draw.randint(*self.lengths)))
        return Question(f"{family}: {word}", RULES[family](word))

    def reward(self, question: Question, completion: str) -> float:
        return float(completion == question.answer)
