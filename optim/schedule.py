"""Schedules of sending and applying: pure functions of the position, on which all peers agree.

The position is the number of inner steps, unless rounds are tokens or seconds (``RoundLength``);
"steps" below are positions.

A lag that is found by watching: each exchange is applied once it is there; how long nearly all take
is what is reported.

It needs no clock. An exchange in flight is polled between steps, so when it arrives is known in
positions of the schedule, the unit in which it is applied. (Ours.)

Arrivals may differ much, as a partner that is behind sends later. Were all of them applied as late
as nearly the latest, the peers that are ahead would train on means of a whole round ago, and gain
nothing by it.

A schedule cuts a round into ``every`` positions. If a round is ``every`` steps, the position is the
number of inner steps. If it is tokens or seconds, the position is in proportion to them, and one
inner step may reach no new position, or several: each is visited once, in order, so no action of
the schedule is skipped or repeated, also with fragments and lags (a lag of 2 is then 2/every of a
round). A step never goes beyond the end of its round.

    # peers of unequal speed
    opt = NoLoCo(inner, exchange, length=Seconds(30, time.time), weight=by_tokens)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Lag = int | Literal["auto"]
"""Positions between sending and applying; "auto": as ``AutoLag`` finds."""

WINDOW = 24
"""Exchanges that are remembered."""


class AutoLag:
    """The lag to expect of the next exchange, from the arrivals of the last ones that had a
    partner.

    Of ``WINDOW`` arrivals two may be later, of four one. On the latest of the others comes an
    eighth as a margin. Before the first arrival it is 1, and never more than ``every``.

    ValueError if ``every`` is below 1.
    """

    def __init__(self, every: int) -> None:
        _check_every(every)
        self.every = every
        self._arrivals: deque[int] = deque(maxlen=WINDOW)

    @property
    def lag(self) -> int:
        """The lag in positions, from 1 to ``every``."""
        if not self._arrivals:
            return 1
        late = (len(self._arrivals) + 8) // 12
        latest = sorted(self._arrivals)[-1 - late]
        return min(latest + latest // 8, self.every)

    @property
    def least(self) -> int:
        """The least of the last arrivals, from which on it is worth asking whether an exchange is
        there; 1 before the first.
        """
        return min(self._arrivals, default=1)

    def observe(self, positions: int) -> None:
        """Remember that an exchange was there so many positions after it was sent; one that was
        waited for: when the wait began.
        """
        self._arrivals.append(min(max(positions, 1), self.every))

    def state(self) -> list[int]:
        return list(self._arrivals)

    def restore(self, arrivals: Sequence[int]) -> None:
        """Go on from what ``state`` returned, with another ``every`` too.

        ValueError if an arrival is no number; unchanged then.
        """
        numbers = [int(positions) for positions in arrivals]
        self._arrivals.clear()
        for positions in numbers:
            self.observe(positions)


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


def _check_every(every: int, fragments: int = 1) -> None:
    if every < 1:
        raise ValueError(f"every must be at least 1 inner step, got {every}")
    if not 1 <= fragments <= every:
        raise ValueError(
            f"fragments must be between 1 and every ({every}) so that each has a step of its own, "
            f"got {fragments}"
        )


@dataclass(frozen=True)
class Every:
    """Schedule of the whole model once every ``every`` inner steps, applied at once (DiLoCo
    2311.08105, NoLoCo 2506.10911).
    """

    every: int

    def __post_init__(self) -> None:
        _check_every(self.every)

    def at(self, step: int) -> list[Send | Apply]:
        return [Send(0), Apply(0)] if step > 0 and step % self.every == 0 else []


def _due(step: int, every: int, fragments: int) -> int | None:
    """Return the fragment sent after ``step``: p if (step - (p + 1) every / fragments) is a
    multiple of ``every``.
    """
    if step < 1:
        return None
    offset = (step - 1) % every + 1  # 1 ... every
    fragment = (offset * fragments + every - 1) // every - 1
    return fragment if (fragment + 1) * every // fragments == offset else None


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
        _check_every(self.every, self.fragments)
        if self.lag != "auto" and not 0 <= self.lag < self.every:
            raise ValueError(
                f"lag must be at least 0 and below every ({self.every}), got {self.lag}: else a "
                "fragment would be sent again "
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
    """Schedule like ``Streaming``, but a mean is applied a whole round later, when its fragment is
    sent again (CO2, eager updates).

    Only for rules that account for the exchange in flight: others would count its contribution
    twice.
    """

    every: int
    fragments: int = 1

    def __post_init__(self) -> None:
        _check_every(self.every, self.fragments)

    def at(self, step: int) -> list[Send | Apply]:
        """Send this round's contribution, then apply the mean of the round before."""
        fragment = _due(step, self.every, self.fragments)
        return [] if fragment is None else [Send(fragment), Apply(fragment, self.every)]


class RoundLength(Protocol):
    """Mapping of inner steps to positions of the schedule. Each optimizer needs one of its own."""

    def reached(self, position: int, schedule: Schedule, tokens: int) -> Iterator[int]:
        """Yield the positions after ``position`` that the latest inner step has reached; iterate to
        the end.

        ``tokens``: counted in all, including this step's.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any], tokens: int) -> None:
        """Restore the state; ``tokens`` were counted by then.

        With the state of another kind of length a round begins there.
        """
        return


class Steps(RoundLength):
    """Rounds of the schedule's ``every`` inner steps: one position each."""

    def reached(self, position: int, schedule: Schedule, tokens: int) -> Iterator[int]:
        yield position + 1


def _target(position: int, every: int, part: float) -> int:
    """Return the position at ``part`` of the round of ``position``: never an earlier one, nor one
    beyond the round's end.
    """
    start = position // every * every
    return max(position, start + min(math.floor(every * part), every))


class Tokens(RoundLength):
    """Rounds of ``tokens`` tokens of this peer, as counted by ``OuterOptimizer.count``.

    The surplus of a batch counts for the next round, so that rounds are that long on average; a
    batch of several rounds is one. ValueError if ``tokens`` is below 1 or none are counted.
    """

    def __init__(self, tokens: int) -> None:
        if tokens < 1:
            raise ValueError(f"a round must have at least 1 token, got {tokens}")
        self.tokens = tokens
        self._began = 0

    def reached(self, position: int, schedule: Schedule, tokens: int) -> Iterator[int]:
        if tokens == 0:
            raise ValueError(
                "no tokens were counted: call opt.count(tokens) before each opt.step(), or let "
                "rounds be steps"
            )
        rounds, rest = divmod(tokens - self._began, self.tokens)
        # In whole numbers, so that every peer and every resumed run computes the same.
        part = 1.0 if rounds else (rest * schedule.every // self.tokens + 0.5) / schedule.every
        target = _target(position, schedule.every, part)
        yield from range(position + 1, target + 1)
        if rounds:
            self._began += rounds * self.tokens

    def state_dict(self) -> dict[str, Any]:
        return {"began": self._began}

    def load_state_dict(self, state_dict: Mapping[str, Any], tokens: int) -> None:
        self._began = min(int(state_dict.get("began", tokens)), tokens)


class Seconds(RoundLength):
    """Rounds of ``seconds`` seconds with any number of inner steps; a round ends after the step
    during which they ran out.

    Rounds end when ``clock`` is at a multiple of ``seconds``: peers whose clocks agree end theirs
    together, from the first one, however long their steps are. A long step or exchange shortens the
    next round and does not move all later ones. So no peer waits for another longer than that
    peer's step takes. A round of less than half the length is not worth an exchange: it continues
    to the next multiple. A clock that is set forward or back costs at most one round of wrong
    length.

    Peers that do as many steps as they can are Anarchic Federated Learning's idea (2108.09875), a
    common length that follows from measured speeds is FedCompass's (2309.14675); the common end
    times are ours.

    ``seconds``: a number, or a function called when a round begins (such as ``agreed_seconds`` of
    the speeds). ``clock``: seconds since an epoch common to all peers, such as ``time.time``; a
    simulation's own.

    ValueError unless ``seconds`` is positive and finite.
    """

    def __init__(self, seconds: float | Callable[[], float], clock: Callable[[], float]) -> None:
        self.seconds, self._clock = seconds, clock
        if not callable(seconds):
            self._now_seconds()
        self._began = self._until = self._length = math.nan

    def _now_seconds(self) -> float:
        value = self.seconds() if callable(self.seconds) else self.seconds
        if not 0 < value < math.inf:
            raise ValueError(
                f"a round must have a positive and finite number of seconds, got {value}"
            )
        return float(value)

    def _begin(self, now: float) -> None:
        self._length, self._began = self._now_seconds(), now
        self._until = (math.floor(now / self._length + 0.5) + 1) * self._length

    def reached(self, position: int, schedule: Schedule, tokens: int) -> Iterator[int]:
        now = self._clock()
        if (
            not now >= self._began
        ):  # the first step, which also compiles and warms up, or the clock was set back
            self._begin(now)
        part = 1.0 if now >= self._until else 1.0 - (self._until - now) / self._length
        target = _target(position, schedule.every, min(part, 1.0))
        if part < 1.0 and target % schedule.every == 0 and target > position:
            target -= 1  # rounding: only the clock ends a round
        yield from range(position + 1, target + 1)
        if target > position and target % schedule.every == 0:
            self._begin(self._clock())  # after the exchange

    def load_state_dict(self, state_dict: Mapping[str, Any], tokens: int) -> None:
        """Begin a new round by the clock, for time goes on while a run is stopped; the position
        stays.
        """
        self._began = self._until = self._length = math.nan


STEPS = 10
"""Least inner steps of the slowest useful peer in a round."""
USEFUL = 1 / 8
"""Rounds are not lengthened for a peer slower than this part of the median speed."""
SHORTEST_S, LONGEST_S = 1.0, 600.0
"""Limits of the length, in seconds."""
GRID = 4
"""Lengths are powers of 2^(1/GRID)."""


def agreed_seconds(speeds: Iterable[float]) -> float:
    """Return the seconds in which the slowest useful peer makes at least ``STEPS`` inner steps (if
    ``LONGEST_S`` allows it).

    A pure function of the peers' inner steps a second, in any order (0, NaN and negative numbers:
    not measured yet). Slightly different views give the same length, since it is rounded up to a
    coarse grid. One liar among at least three peers cannot move it beyond 8 times what the others'
    speeds allow: a slow liar is at best just useful, a fast one only shifts the median to another
    honest peer. The median of an even number is the lower middle one, so of two peers both are
    useful. (Ours.)

    Without any speed it is ``SHORTEST_S``: a new swarm measures them soon.
    """
    ordered = sorted(speed for speed in speeds if 0 < speed < math.inf)
    if not ordered:
        return SHORTEST_S
    median = ordered[(len(ordered) - 1) // 2]
    slowest = next(speed for speed in ordered if speed >= median * USEFUL)
    wanted = min(max(STEPS / slowest, SHORTEST_S), LONGEST_S)
    # The small amount allows for rounding of the logarithm, so that a length on the grid is not
    # changed.
    rounded = math.pow(2.0, math.ceil(math.log2(wanted) * GRID - 1e-9) / GRID)
    return min(max(rounded, SHORTEST_S), LONGEST_S)


def bounded_speeds(
    speeds: Collection[float], trusted: Collection[float], most: float
) -> list[float]:
    """Return ``speeds`` for `agreed_seconds`, or one in their place that makes the length ``most``
    times longer or shorter than the ``trusted`` speeds do, if they would move it further. Whoever
    sees the same within that bound agrees on the same length.
    """
    wanted, near = agreed_seconds(speeds), agreed_seconds(trusted)
    bounded = min(max(wanted, near / most), near * most)
    return (
        [*speeds]
        if bounded == wanted or not any(speed > 0 for speed in trusted)
        else [STEPS / bounded]
    )
