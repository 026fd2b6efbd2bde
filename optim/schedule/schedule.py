"""Schedules of sending and applying: pure functions of the position, on which all peers agree.

The position is the number of inner steps, unless rounds are tokens or seconds (``RoundLength``); "steps" below are positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shoal.optim.schedule.auto_lag import Lag


@dataclass(frozen=True)
class Send:
    """Action: hand a fragment's contribution to the exchange."""

    fragment: int


@dataclass(frozen=True)
class Apply:
    """Action: wait for a fragment's mean and apply the outer rule."""

    fragment: int
    after: int | None = None
    """Positions since its ``Send``, whose exchange may have been cancelled. None: the oldest in flight."""


class Schedule(Protocol):
    """Mapping of the number of finished inner steps to the actions before the next one."""

    @property
    def every(self) -> int:
        """Positions in a round; each fragment is sent once in so many."""
        ...

    def at(self, step: int) -> list[Send | Apply]:
        """Return the actions after inner step ``step`` (1 is the first), in order."""
        ...


def _check_every(every: int, fragments: int = 1) -> None:
    if every < 1:
        raise ValueError(f"every must be at least 1 inner step, got {every}")
    if not 1 <= fragments <= every:
        raise ValueError(f"fragments must be between 1 and every ({every}) so that each has a step of its own, got {fragments}")


@dataclass(frozen=True)
class Every:
    """Schedule of the whole model once every ``every`` inner steps, applied at once (DiLoCo 2311.08105, NoLoCo 2506.10911)."""

    every: int

    def __post_init__(self) -> None:
        _check_every(self.every)

    def at(self, step: int) -> list[Send | Apply]:
        """Send and apply at each multiple of ``every``."""
        return [Send(0), Apply(0)] if step > 0 and step % self.every == 0 else []


def _due(step: int, every: int, fragments: int) -> int | None:
    """Return the fragment sent after ``step``: p if (step - (p + 1) every / fragments) is a multiple of ``every``."""
    if step < 1:
        return None
    offset = (step - 1) % every + 1  # 1 ... every
    fragment = (offset * fragments + every - 1) // every - 1
    return fragment if (fragment + 1) * every // fragments == offset else None


@dataclass(frozen=True)
class Streaming:
    """Schedule of ``fragments`` evenly apart, each once every ``every`` steps, applied ``lag`` later (Streaming DiLoCo 2501.18512).

    lag "auto": it says only when to send. The optimizer applies a mean once it is there (``AutoLag``).
    Unlike torchft's it allows several fragments in flight, and an ``every`` that is no multiple of ``fragments``.
    """

    every: int
    fragments: int = 1
    lag: Lag = 0

    def __post_init__(self) -> None:
        _check_every(self.every, self.fragments)
        if self.lag != "auto" and not 0 <= self.lag < self.every:
            raise ValueError(
                f"lag must be at least 0 and below every ({self.every}), got {self.lag}: else a fragment would be sent again "
                "before its mean was applied"
            )

    def at(self, step: int) -> list[Send | Apply]:
        """Send first, so that the network can begin, then apply."""
        actions: list[Send | Apply] = []
        if (fragment := _due(step, self.every, self.fragments)) is not None:
            actions.append(Send(fragment))
        if self.lag == "auto":
            return actions
        if (fragment := _due(step - self.lag, self.every, self.fragments)) is not None:
            actions.append(Apply(fragment, self.lag))
        return actions


@dataclass(frozen=True)
class Delayed:
    """Schedule like ``Streaming``, but a mean is applied a whole round later, when its fragment is sent again (CO2, eager updates).

    Only for rules that account for the exchange in flight: others would count its contribution twice.
    """

    every: int
    fragments: int = 1

    def __post_init__(self) -> None:
        _check_every(self.every, self.fragments)

    def at(self, step: int) -> list[Send | Apply]:
        """Send this round's contribution, then apply the mean of the round before."""
        fragment = _due(step, self.every, self.fragments)
        return [] if fragment is None else [Send(fragment), Apply(fragment, self.every)]
