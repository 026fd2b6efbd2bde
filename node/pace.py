"""How fast this node trains, and how long its rounds are."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from optim import RoundLength, Seconds, Steps, Tokens
from optim.length_auto import agreed_seconds
from swarm.round_setting import parse_round

WINDOW = 20  # reports that the speed is measured over


class Speed:
    """Inner steps a second, without what is spent waiting for others, over the last reports."""

    def __init__(self) -> None:
        self._reports: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._warm = False

    def add(self, steps: int, seconds: float) -> float:
        """The speed, after one more report of ``steps`` inner steps that took ``seconds``."""
        if len(self._reports) == 1 and not self._warm:  # the first one warms up, compiles and reads data for the first time
            self._reports.clear()
            self._warm = True
        self._reports.append((steps, max(seconds, 0.0)))
        took = sum(seconds for _, seconds in self._reports)
        return sum(steps for steps, _ in self._reports) / took if took > 0 else 0.0


def round_length(setting: str, clock: Callable[[], float], speeds: Callable[[], Iterable[float]]) -> RoundLength:
    """The length of a round that ``outer.round`` asks for.

    ``clock``: Unix seconds, which are the same for all peers. ``speeds``: inner steps a second of all members, for seconds:auto.
    """
    unit, amount = parse_round(setting)
    if unit == "steps":
        return Steps()
    if unit == "tokens":
        assert amount is not None  # parse_round sees to it
        return Tokens(int(amount))
    return Seconds(amount if amount is not None else lambda: agreed_seconds(speeds()), clock)
