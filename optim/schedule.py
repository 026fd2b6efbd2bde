"""When to send and when to apply: a pure function of the step, so that every peer agrees and every schedule can be tested alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Send:
    """Hand a fragment's contribution to the exchange."""

    fragment: int


@dataclass(frozen=True)
class Apply:
    """Wait for a fragment's mean and apply the outer rule."""

    fragment: int


class Schedule(Protocol):
    """Maps the number of finished inner steps to what is done before the next one."""

    def at(self, step: int) -> list[Send | Apply]:
        """Actions after inner step ``step`` (1 is the first), in order."""
        ...


@dataclass(frozen=True)
class Every:
    """The whole model once every ``every`` inner steps, applied at once (DiLoCo 2311.08105, NoLoCo 2506.10911)."""

    every: int

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every must be at least 1 inner step, got {self.every}")

    def at(self, step: int) -> list[Send | Apply]:
        """Send and apply at each multiple of ``every``."""
        return [Send(0), Apply(0)] if step > 0 and step % self.every == 0 else []
