"""When a fragment is sent, and when its mean is applied: pure functions on which all peers agree.

    Streaming(every=100, fragments=4, lag=5).at(25)       # [Send(0)]
    Streaming(every=100, fragments=4, lag=5).at(30)       # [Apply(0, 5)]

A schedule counts positions, of which a round has ``every``: inner steps, unless rounds are tokens
or seconds (`shoal.optim.schedule.round_length`). "Steps" below are positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

Lag = int | Literal["auto"]
"""Positions between sending and applying; "auto": as ``AutoLag`` finds."""


@dataclass(frozen=True)
class Send:
    """Action: hand a fragment's contribution to the exchange."""

    fragment: int


@dataclass(frozen=True)
class Apply:
    """Action: wait for a fragment's mean and apply the outer rule."""

    fragment: int
    after: int | None = None
    """Positions since its ``Send``, whose exchange may have been cancelled.

    None: the oldest in flight.
    """


class Schedule(Protocol):
    """Mapping of the number of finished inner steps to the actions before the next one."""

    @property
    def every(self) -> int:
        """Positions in a round; each fragment is sent once in so many."""
        ...

    def at(self, step: int) -> list[Send | Apply]:
        """Return the actions after inner step ``step`` (1 is the first), in order."""
        ...


@dataclass(frozen=True)
class Every:
    """Schedule of the whole model once every ``every`` inner steps, applied at once (DiLoCo
    2311.08105, NoLoCo 2506.10911).
    """

    every: int

    def __post_init__(self) -> None:
        check_every(self.every)

    def at(self, step: int) -> list[Send | Apply]:
        if step < 1 or step % self.every:
            return []
        return [Send(0), Apply(0)]


@dataclass(frozen=True)
class Streaming:
    """Schedule of ``fragments`` evenly apart, each once every ``every`` steps, applied ``lag``
    later (Streaming DiLoCo 2501.18512).

    lag "auto": it says only when to send. The optimizer applies a mean once it is there
    (``AutoLag``). Unlike torchft's it allows several fragments in flight, and an ``every`` that is
    no multiple of ``fragments``.
    """

    every: int
    fragments: int = 1
    lag: Lag = 0

    def __post_init__(self) -> None:
        check_every(self.every, self.fragments)
        if self.lag != "auto" and not 0 <= self.lag < self.every:
            raise ValueError(
                f"lag must be at least 0 and below every ({self.every}), got {self.lag}: else a "
                "fragment would be sent again before its mean was applied"
            )

    def at(self, step: int) -> list[Send | Apply]:
        """Send first, so that the network can begin, then apply."""
        actions: list[Send | Apply] = []
        sent = _due(step, self.every, self.fragments)
        if sent is not None:
            actions.append(Send(sent))
        if self.lag == "auto":
            return actions
        applied = _due(step - self.lag, self.every, self.fragments)
        if applied is not None:
            actions.append(Apply(applied, self.lag))
        return actions


@dataclass(frozen=True)
class SentAhead(Streaming):
    """Schedule in torchft's phase: a fragment is applied where ``Streaming`` sends it, and sent
    ``lag`` steps before, after the fragment before it was applied. All peers have the same lag.

        SentAhead(every=100, fragments=4, lag=5).at(20)   # [Send(0)]
        SentAhead(every=100, fragments=4, lag=5).at(25)   # [Apply(0, 5)]
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lag == "auto":
            raise ValueError(
                "a fragment that is sent ahead needs a lag in steps, and auto is known only "
                "afterwards: give a number"
            )
        share = self.every // self.fragments
        if self.lag >= share:
            raise ValueError(
                f"a fragment that is sent ahead needs a lag below its share of a round ({share} "
                f"steps), got {self.lag}: choose a shorter lag, a longer every or fewer fragments"
            )

    def at(self, step: int) -> list[Send | Apply]:
        """Send first, so that the network can begin, then apply."""
        assert self.lag != "auto"
        actions: list[Send | Apply] = []
        if step < 1:
            return actions
        sent = _due(step + self.lag, self.every, self.fragments)
        if sent is not None:
            actions.append(Send(sent))
        applied = _due(step, self.every, self.fragments)
        if applied is not None:
            actions.append(Apply(applied, self.lag))
        return actions


@dataclass(frozen=True)
class Delayed:
    """Schedule like ``Streaming``, but a mean is applied a whole round later, when its fragment is
    sent again (CO2, eager updates).

    Only for rules that account for the exchange in flight: others would count its contribution
    twice.
    """

    every: int
    fragments: int = 1

    def __post_init__(self) -> None:
        check_every(self.every, self.fragments)

    def at(self, step: int) -> list[Send | Apply]:
        """Send this round's contribution, then apply the mean of the round before."""
        fragment = _due(step, self.every, self.fragments)
        if fragment is None:
            return []
        return [Send(fragment), Apply(fragment, self.every)]


def _due(step: int, every: int, fragments: int) -> int | None:
    """Return the fragment sent after ``step``: p if (step - (p + 1) every / fragments) is a
    multiple of ``every``.
    """
    if step < 1:
        return None
    offset = (step - 1) % every + 1  # 1 ... every
    fragment = (offset * fragments + every - 1) // every - 1
    return fragment if (fragment + 1) * every // fragments == offset else None


def check_every(every: int, fragments: int = 1) -> None:
    """Raise ValueError unless a round has a position for each fragment."""
    if every < 1:
        raise ValueError(f"every must be at least 1 inner step, got {every}")
    if not 1 <= fragments <= every:
        raise ValueError(
            f"fragments must be between 1 and every ({every}) so that each has a step of its own, "
            f"got {fragments}"
        )
