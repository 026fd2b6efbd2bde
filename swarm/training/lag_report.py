"""A node's account of the lag of its exchanges: for its record, for those who watch, and for its user."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from shoal.optim import OuterOptimizer, RoundInfo
from shoal.swarm.exchange.cost import every_that_fits

MBIT = 125_000  # bytes
FULL = 8  # exchanges in a row that took a whole round, after which the user is informed
WAITED_S = 0.05  # seconds of waiting that count as such


class LagReport:
    """Account of the exchanges of ``opt``; for the thread that trains.

    ``rate``: returns the bytes a second that this node's link carries, None where that is not known. ``clock``: seconds.
    """

    def __init__(
        self, opt: OuterOptimizer, rate: Callable[[], float | None] = lambda: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._opt, self._rate, self._clock = opt, rate, clock
        self.late = 0
        """Exchanges so far that came after their lag."""
        self._waits: deque[float] = deque(maxlen=FULL)
        self._reported = False
        self._rounds: deque[tuple[int, float, int]] = deque(maxlen=FULL)  # bytes sent, seconds of computing, inner steps
        self._over: tuple[float, int] | None = None  # when the last exchange was applied, and after how many inner steps

    def on_round(self, info: RoundInfo, wait_s: float, sent: int = 0) -> None:
        """Note an exchange that was applied; training stood still for ``wait_s`` seconds since the one before, and this node sent
        ``sent`` bytes of all kinds.
        """
        self.late += info.late
        now, over = self._clock(), self._over
        self._over = now, info.step
        if len(info.members) > 1 and wait_s > WAITED_S and over is not None:
            self._rounds.append((sent, now - over[0] - wait_s, info.step - over[1]))
        else:
            self._rounds.clear()
        if len(info.members) > 1 and wait_s > WAITED_S and self._opt.lag_auto and self._opt.lag >= self._opt.schedule.every:
            self._waits.append(wait_s)
        else:
            self._waits.clear()

    def details(self) -> dict[str, Any]:
        """Return the fields of `shoal.swarm.wire.member.Member` about the lag."""
        return {"lag": self._opt.lag, "lag_auto": self._opt.lag_auto, "late": self.late}

    def events(self) -> list[str]:
        """Return a sentence, once, if the link does not carry the settings: exchanges take longer than a round's computing."""
        if self._reported:
            return []
        sentence = self._too_slow()
        if not sentence and len(self._waits) == FULL:
            sentence = (
                f"Exchanges take this node longer than a round, so training waits for each ({sum(self._waits) / FULL:.2g} s of "
                "late): longer rounds (outer.every) or a smaller codec (outer.codec) would end that, more fragments would not; "
                "`shoal plan` shows which settings fit this link."
            )
        self._reported = bool(sentence)
        return [sentence] if sentence else []

    def _too_slow(self) -> str:
        rate = self._rate()
        nbytes, seconds, steps = (sum(part) for part in zip(*self._rounds, strict=True)) if self._rounds else (0, 0.0, 0)
        if rate is None or len(self._rounds) < FULL or nbytes <= rate * seconds or seconds <= 0 or steps <= 0:
            return ""
        every, params = self._opt.schedule.every, sum(math.prod(shape) for shape in self._opt.shapes)
        return (
            f"This node's link carries {rate / MBIT:.2g} Mbit/s, but these settings send {nbytes / seconds / MBIT:.2g} Mbit/s for "
            f"the time that it computes, so training waits for the network: rounds of "
            f"{every_that_fits(every, nbytes / seconds, rate)} inner steps (outer.every, now {every}) or a smaller codec "
            f"(outer.codec) would fit; see `shoal plan --params {params} --mbit {rate / MBIT:.2g} --step {seconds / steps:.2g}`."
        )
