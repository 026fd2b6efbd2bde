"""How long a round is: so many inner steps, tokens, or seconds; it says which positions of the schedule an inner step has reached.

A schedule cuts a round into ``every`` positions. Where a round is ``every`` steps, the position is the number of inner steps. Where
it is tokens or seconds, so much of the round is over as of its tokens or seconds, and one inner step may reach no new position, or
several: each is visited once, in order, so nothing that the schedule asks for is skipped or done twice, also for fragments and
lags (a lag of 2 is then 2/every of a round). A step never goes beyond the end of its round.

    opt = NoLoCo(inner, exchange, length=Seconds(30, time.time), weight=by_tokens)      # uneven peers: each does what it can
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from shoal.optim.schedule.schedule import Schedule


class RoundLength(Protocol):
    """How an optimizer moves through its schedule. Each optimizer needs one of its own."""

    def reached(self, position: int, schedule: Schedule, tokens: int) -> Iterator[int]:
        """The positions after ``position`` that the inner step that has just ended has reached; iterate to the end.

        ``tokens``: counted in all, this step's included.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any], tokens: int) -> None:
        """Restore it; ``tokens`` were counted by then. A state of another kind begins a round there."""
        ...


class Steps:
    """A round is the schedule's ``every`` inner steps: one position each."""

    def reached(self, position: int, schedule: Schedule, tokens: int) -> Iterator[int]:
        """The next one."""
        yield position + 1

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the position says all."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any], tokens: int) -> None:
        """Nothing."""


def _target(position: int, every: int, part: float) -> int:
    """The position at ``part`` of the round that ``position`` is in: never back, and never beyond the round's end."""
    start = position // every * every
    return max(position, start + min(math.floor(every * part), every))


class Tokens:
    """A round is ``tokens`` tokens of this peer, as told to ``OuterOptimizer.count``.

    What a batch has too much goes to the next round, so that rounds are that long on average; a batch of several rounds is one.
    ValueError if ``tokens`` is below 1 or none are counted.
    """

    def __init__(self, tokens: int) -> None:
        if tokens < 1:
            raise ValueError(f"a round must have at least 1 token, got {tokens}")
        self.tokens = tokens
        self._began = 0

    def reached(self, position: int, schedule: Schedule, tokens: int) -> Iterator[int]:
        """As many as the tokens allow."""
        if tokens == 0:
            raise ValueError("no tokens were counted: call opt.count(tokens) before each opt.step(), or let rounds be steps")
        rounds, rest = divmod(tokens - self._began, self.tokens)
        # In whole numbers, so that every peer and every resumed run computes the same.
        part = 1.0 if rounds else (rest * schedule.every // self.tokens + 0.5) / schedule.every
        target = _target(position, schedule.every, part)
        yield from range(position + 1, target + 1)
        if rounds:
            self._began += rounds * self.tokens

    def state_dict(self) -> dict[str, Any]:
        """The tokens at which the round began."""
        return {"began": self._began}

    def load_state_dict(self, state_dict: Mapping[str, Any], tokens: int) -> None:
        """Go on in the same round."""
        self._began = min(int(state_dict.get("began", tokens)), tokens)


class Seconds:
    """A round is ``seconds`` seconds, whatever number of inner steps fit; it is over after the step during which they ran out.

    Rounds end where ``clock`` is at a multiple of ``seconds``: peers whose clocks agree end theirs together, from the first one,
    however long their steps are, and a step, or an exchange, that took long shortens the next round rather than move all later
    ones. So nobody waits for another peer longer than that peer's step takes. A round of less than half the length is not worth an
    exchange: it goes on to the next multiple. A clock that is set forward or back costs at most one round of wrong length.

    That peers do as many steps as they can is Anarchic Federated Learning's idea (2108.09875), a common length that follows from
    measured speeds FedCompass's (2309.14675); the common moments are ours.

    ``seconds``: a number, or a function that is asked when a round begins (optim/length_auto.py).
    ``clock``: seconds since a moment that is the same for all peers, such as ``time.time``; a simulation's own.

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
            raise ValueError(f"a round must have a positive and finite number of seconds, got {value}")
        return float(value)

    def _begin(self, now: float) -> None:
        self._length, self._began = self._now_seconds(), now
        self._until = (math.floor(now / self._length + 0.5) + 1) * self._length

    def reached(self, position: int, schedule: Schedule, tokens: int) -> Iterator[int]:
        """As many as the time allows."""
        now = self._clock()
        if not now >= self._began:  # the first step, which also compiles and warms up, or the clock was set back
            self._begin(now)
        part = 1.0 if now >= self._until else 1.0 - (self._until - now) / self._length
        target = _target(position, schedule.every, min(part, 1.0))
        if part < 1.0 and target % schedule.every == 0 and target > position:
            target -= 1  # rounding: the end is reached by the clock alone
        yield from range(position + 1, target + 1)
        if target > position and target % schedule.every == 0:
            self._begin(self._clock())  # after the exchange

    def state_dict(self) -> dict[str, Any]:
        """Nothing: time goes on while a run stands still."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any], tokens: int) -> None:
        """Begin to look at the clock anew; the position stays."""
        self._began = self._until = self._length = math.nan
