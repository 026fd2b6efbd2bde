"""A node's account of the lag of its exchanges: for its record, for those who watch, and for its user."""

from __future__ import annotations

from collections import deque
from typing import Any

from shoal.optim import OuterOptimizer, RoundInfo

FULL = 8  # exchanges in a row that took a whole round, after which the user is informed
WAITED_S = 0.05  # seconds of waiting that count as such


class LagReport:
    """Account of the exchanges of ``opt``; for the thread that trains."""

    def __init__(self, opt: OuterOptimizer) -> None:
        self._opt = opt
        self.late = 0
        """Exchanges so far that came after their lag."""
        self._waits: deque[float] = deque(maxlen=FULL)
        self._reported = False

    def on_round(self, info: RoundInfo, wait_s: float) -> None:
        """Note an exchange that was applied; training stood still for ``wait_s`` seconds since the one before."""
        self.late += info.late
        if len(info.members) > 1 and wait_s > WAITED_S and self._opt.lag_auto and self._opt.lag >= self._opt.schedule.every:
            self._waits.append(wait_s)
        else:
            self._waits.clear()

    def details(self) -> dict[str, Any]:
        """Return the fields of `shoal.swarm.wire.member.Member` about the lag."""
        return {"lag": self._opt.lag, "lag_auto": self._opt.lag_auto, "late": self.late}

    def events(self) -> list[str]:
        """Return a sentence, once, if exchanges take longer than a round."""
        if self._reported or len(self._waits) < FULL:
            return []
        self._reported = True
        return [
            f"Exchanges take this node longer than a round, so training waits for each ({sum(self._waits) / FULL:.2g} s of late): "
            "longer rounds (outer.every) or a smaller codec (outer.codec) would end that, more fragments would not; `shoal plan` "
            "shows which settings fit this link."
        ]
