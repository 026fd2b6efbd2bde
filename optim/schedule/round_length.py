"""How long a round is: steps, tokens or seconds, mapped to the positions of a schedule.

    opt = NoLoCo(inner, exchange, length=Seconds(30, time.time), weight=by_tokens)

A schedule cuts a round into ``every`` positions. In a round of tokens or seconds one inner step may
reach no new position, or several: each is visited once, in order, so no action is skipped or
repeated (a lag of 2 is then 2/every of a round). A step never goes beyond the end of its round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from shoal.optim.schedule.schedules import Schedule


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
        reached = (rest * schedule.every // self.tokens + 0.5) / schedule.every
        target = _target(position, schedule.every, 1.0 if rounds else reached)
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

    Rounds end when ``clock`` is at a multiple of ``seconds``, so peers whose clocks agree end
    theirs together (docs/internals.md, "Rounds of seconds"). A round of less than half the length
    continues to the next multiple. A clock that is set forward or back costs at most one round of
    wrong length.

    Args:
        seconds: a number, or a function called when a round begins (such as ``agreed_seconds`` of
            the speeds).
        clock: seconds since an epoch common to all peers, such as ``time.time``; a simulation's
            own.

    Raises:
        ValueError: ``seconds`` is not positive and finite.
    """

    def __init__(self, seconds: float | Callable[[], float], clock: Callable[[], float]) -> None:
        self.seconds = seconds
        self._clock = clock
        if not callable(seconds):
            self._now_seconds()
        self._forget_round()

    def reached(self, position: int, schedule: Schedule, tokens: int) -> Iterator[int]:
        now = self._clock()
        # Before the first step, which also compiles and warms up, or the clock was set back.
        if not now >= self._began:
            self._begin(now)
        part = 1.0
        if not now >= self._until:
            part = 1.0 - (self._until - now) / self._length
        target = _target(position, schedule.every, part)
        if part < 1.0 and target % schedule.every == 0 and target > position:
            target -= 1  # rounding: only the clock ends a round
        yield from range(position + 1, target + 1)
        if target > position and target % schedule.every == 0:
            self._begin(self._clock())  # after the exchange

    def load_state_dict(self, state_dict: Mapping[str, Any], tokens: int) -> None:
        """Begin a new round by the clock, for time goes on while a run is stopped; the position
        stays.
        """
        self._forget_round()

    def _forget_round(self) -> None:
        self._began = math.nan
        self._until = math.nan
        self._length = math.nan

    def _begin(self, now: float) -> None:
        self._length = self._now_seconds()
        self._began = now
        self._until = (math.floor(now / self._length + 0.5) + 1) * self._length

    def _now_seconds(self) -> float:
        value = self.seconds() if callable(self.seconds) else self.seconds
        if not 0 < value < math.inf:
            raise ValueError(
                f"a round must have a positive and finite number of seconds, got {value}"
            )
        return float(value)


def _target(position: int, every: int, part: float) -> int:
    """Return the position at ``part`` of the round of ``position``: never an earlier one, nor one
    beyond the round's end.
    """
    start = position // every * every
    return max(position, start + min(math.floor(every * part), every))
