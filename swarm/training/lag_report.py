"""Whether the link carries the settings: how late exchanges come, and what to do about it."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from shoal.optim import OuterOptimizer, RoundInfo, Steps
from shoal.swarm.exchange.cost import BUSY
from shoal.swarm.repeats import Repeats
from shoal.swarm.training.notice import Notice

BYTES_OF_MBIT = 125_000
LATE_ROUNDS = 8
"""Exchanges in a row that took a whole round, after which the user is informed."""
WAITED_S = 0.05
"""Of waiting that count as such."""


class _RoundCost(NamedTuple):
    sent: int
    """Bytes."""
    computing_s: float
    steps: int


class LagReport:
    """Account of the exchanges of ``opt``; for the thread that trains.

    ``rate``: returns the bytes a second that this node's link carries, None where that is not
    known. ``clock``: seconds.
    """

    def __init__(
        self,
        opt: OuterOptimizer,
        rate: Callable[[], float | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._opt = opt
        self._rate = rate
        self._said = Repeats(clock)
        self.late = 0
        """Exchanges so far that came after their lag."""
        self._waits: deque[float] = deque(maxlen=LATE_ROUNDS)
        self._rounds: deque[_RoundCost] = deque(maxlen=LATE_ROUNDS)
        # When the last exchange was applied, and after how many inner steps.
        self._over: tuple[float, int] | None = None

    def on_round(self, info: RoundInfo, wait_s: float, sent: int = 0) -> None:
        """Note an exchange that was applied; training stood still for ``wait_s`` seconds since the
        one before, and this node sent ``sent`` bytes of all kinds.
        """
        self.late += info.late
        now = self._said.clock()
        over = self._over
        self._over = now, info.step
        was_late = len(info.members) > 1 and wait_s > WAITED_S
        if was_late and over is not None:
            self._rounds.append(_RoundCost(sent, now - over[0] - wait_s, info.step - over[1]))
        else:
            self._rounds.clear()
        if was_late and self._opt.lag_auto and self._opt.lag >= self._opt.schedule.every:
            self._waits.append(wait_s)
        else:
            self._waits.clear()

    def news(self) -> list[Notice]:
        """Return a sentence, once, if the link does not carry the settings: exchanges take longer
        than a round's computing.
        """
        sentence = self._too_slow()
        if not sentence and len(self._waits) == LATE_ROUNDS:
            waited_s = sum(self._waits) / LATE_ROUNDS
            sentence = (
                "Exchanges take this node longer than a round, so training waits for each "
                f"({waited_s:.2g} s recently): longer rounds ({self._longer()}) or "
                "a smaller codec (outer.codec) would end that, more fragments would not; `shoal "
                "plan` shows which settings fit this link."
            )
        return [Notice("lag", sentence)] if sentence and self._said.due("lag") else []

    def _longer(self) -> str:
        """Return the setting that says how long a round is."""
        return "outer.every" if isinstance(self._opt.length, Steps) else "outer.round"

    def _too_slow(self) -> str:
        rate = self._rate()
        nbytes = sum(one.sent for one in self._rounds)
        seconds = sum(one.computing_s for one in self._rounds)
        steps = sum(one.steps for one in self._rounds)
        if rate is None or len(self._rounds) < LATE_ROUNDS:
            return ""
        if nbytes <= rate * seconds or seconds <= 0 or steps <= 0:
            return ""
        every = self._opt.schedule.every
        params = sum(math.prod(shape) for shape in self._opt.shapes)
        times = nbytes / seconds / (BUSY * rate)
        rounds = f"rounds of {math.ceil(every * times)} inner steps (outer.every, now {every})"
        if self._longer() != "outer.every":
            rounds = f"rounds {times:.2g} times as long ({self._longer()})"
        carried = rate / BYTES_OF_MBIT
        needed = nbytes / seconds / BYTES_OF_MBIT
        return (
            f"This node's link carries {carried:.2g} Mbit/s, but these settings send "
            f"{needed:.2g} Mbit/s for the time that it computes, so training "
            f"waits for the network: {rounds} or a smaller codec (outer.codec) would fit; see "
            f"`shoal plan --params {params} --mbit {carried:.2g} --step "
            f"{seconds / steps:.2g}`."
        )
