"""Which questions a node asks in each round.

They follow from the swarm's seed and the node's name, so that no two nodes ask the same:

    mine = OwnQuestions(env, seed).of_node(f"{swarm}:{peer}", folder)
    mine.of_round(0, 4, frozenset())  # four pairs of an index and a question
"""

from __future__ import annotations

import hashlib
from collections.abc import Set
from pathlib import Path

from shoal.node.rl.asked_rounds import AskedRounds
from shoal.node.rl.environment import Env, EnvError, Question

DRAWS_PER_ROUND = 1000
"""Attempts at questions that are not held out."""


class OwnQuestions:
    """Questions of the node ``me`` in ``env``; ``folder``: where it notes which it has asked."""

    def __init__(self, env: Env, seed: int, me: str = "", folder: Path | None = None) -> None:
        self._env = env
        self._seed = seed
        self._me = me
        self.seed = self.number("questions", 0)
        """Of all its questions; with an index it names one of them."""
        self._asked = AskedRounds(folder, self.seed)

    def of_node(self, me: str, folder: Path | None) -> OwnQuestions:
        """Return the questions of another node."""
        return OwnQuestions(self._env, self._seed, me, folder)

    def number(self, what: str, number: int) -> int:
        """Return a number below 2^62, so that no own question has the held-out seed."""
        text = f"shoal/rl/1:{self._seed}:{self._me}:{what}:{number}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 2

    def begin(self, round: int) -> None:
        """Begin, or go on, with ``round``, though others of that number may have been asked."""
        self._asked.begin(round)

    def of_round(self, round: int, count: int, held_out: Set[str]) -> list[tuple[int, Question]]:
        """Return indices and questions of ``round``, none with a prompt in ``held_out``.

        EnvError if there seem to be no others.
        """
        found: list[tuple[int, Question]] = []
        block = self._asked.ask(round)
        index = block * DRAWS_PER_ROUND
        while len(found) < count:
            question = self._env.made.question(self.seed, index)
            if question.prompt not in held_out:
                found.append((index, question))
            index += 1
            if index >= (block + 1) * DRAWS_PER_ROUND:
                raise EnvError(
                    f"Of {DRAWS_PER_ROUND} questions of {self._env.label!r} hardly one is not held "
                    "out: make it ask more different questions, or set rl.held_out lower."
                )
        return found
