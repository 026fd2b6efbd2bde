"""How far an outer optimizer has come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class Progress:
    """Counts of one outer optimizer, which its checkpoint holds."""

    applied: list[int]
    """The last round that was applied to each fragment; -1: none yet."""
    steps: int = 0
    """Inner steps taken."""
    position: int = 0
    """Position in the schedule: ``steps``, unless rounds are of another ``length``."""
    round: int = 0
    """Number of the next exchange."""
    tokens: int = 0
    """Tokens counted in all."""

    @classmethod
    def of(cls, state: Mapping[str, Any], applied: list[int]) -> Progress:
        """Return that of a saved state; ``applied`` is for one that lacks it."""
        steps = int(state.get("steps", 0))
        return cls(
            applied=[int(round) for round in state.get("applied", applied)],
            steps=steps,
            position=int(state.get("position", steps)),
            round=int(state.get("round", 0)),
            tokens=int(state.get("tokens", 0)),
        )
