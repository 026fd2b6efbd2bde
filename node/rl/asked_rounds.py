"""How many rounds of questions a node has asked, kept in its folder.

A node that ended without a checkpoint goes on from an older round. The questions of the rounds
since then were asked and shared already: others have learnt from them, and it asks new ones.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from shoal.swarm.file_lock import replace_file

log = logging.getLogger(__name__)

NAME = "asked.json"
MAX_FILE_BYTES = 1024
MAX_ROUNDS = 2**40


class AskedRounds:
    """The count of ``seed``'s rounds of questions in ``folder``; None: it is kept nowhere."""

    def __init__(self, folder: Path | None, seed: int) -> None:
        self._file = None if folder is None else folder / NAME
        self._seed = seed
        self._ahead = 0

    def begin(self, round: int) -> None:
        """Begin, or go on, with ``round``: the first whose questions are asked from now on."""
        self._ahead = max(self._read() - round, 0)

    def ask(self, round: int) -> int:
        """Return the number of the questions to ask in ``round``, and note that they are asked."""
        number = round + self._ahead
        if self._file is not None:
            try:
                replace_file(self._file, json.dumps({"seed": self._seed, "rounds": number + 1}))
            except OSError as error:
                # Training goes on, as it does where metrics cannot be written.
                log.warning("%s was not written: %s", NAME, error.strerror)
        return number

    def _read(self) -> int:
        """Return how many rounds were asked; 0 if another node, or another swarm's, asked them."""
        if self._file is None:
            return 0
        try:
            with self._file.open("rb") as file:
                found = json.loads(file.read(MAX_FILE_BYTES))
            rounds = found["rounds"] if found["seed"] == self._seed else 0
        except (OSError, ValueError, KeyError, TypeError):
            return 0
        return rounds if type(rounds) is int and 0 <= rounds <= MAX_ROUNDS else 0
