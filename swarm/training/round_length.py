"""How fast this node trains, and how long its rounds are."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from statistics import median_high

from shoal.optim import RoundLength, Seconds, Steps, Tokens
from shoal.optim.schedule.auto_length import agreed_seconds
from shoal.swarm.manifest.round_setting import parse_round

WINDOW = 20  # reports that the speed is measured over


class Speed:
    """Inner steps a second, as they usually are: the median of the last reports.

    So neither the first one, which compiles and reads data for the first time, nor one in which the machine slept, counts much.
    """

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=WINDOW)

    def add(self, steps: int, seconds: float) -> float:
        """The speed, after one more report of ``steps`` inner steps that took ``seconds`` without waiting for others."""
        if seconds > 0:
            self._rates.append(steps / seconds)
        return median_high(self._rates) if self._rates else 0.0


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
