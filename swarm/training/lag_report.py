"""What training waits for, a slower member or the network, and what to do about it."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import NamedTuple

from shoal.optim import OuterOptimizer, RoundInfo, Steps
from shoal.swarm.exchange.cost import BUSY
from shoal.swarm.figures import duration
from shoal.swarm.repeats import Repeats
from shoal.swarm.training.group_speeds import GroupSpeeds
from shoal.swarm.training.notice import Notice

BYTES_OF_MBIT = 125_000
LATE_ROUNDS = 8
"""Exchanges in a row that took a whole round, after which the user is informed."""
WAITED_S = 0.05
"""Of waiting that count as such."""
MOST_OF_WAIT = 0.5
"""Share of the waiting that follows from a member's speed if it is the cause."""


class _RoundCost(NamedTuple):
    sent: int
    """Bytes."""
    computing_s: float
    waited_s: float
    steps: int


class LagReport:
    """Account of the exchanges of ``opt``; for the thread that trains.

    ``rate``: returns the bytes a second that this node's link carries, None where that is not
    known. ``speeds``: returns those of the members of a group (`group_speeds`); None where the
    method does not average over everyone. ``clock``: seconds.
    """

    def __init__(
        self,
        opt: OuterOptimizer,
        rate: Callable[[], float | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        speeds: Callable[[Collection[str]], GroupSpeeds | None] | None = None,
    ) -> None:
        self._opt = opt
        self._rate = rate
        self._speeds = speeds
        self._said = Repeats(clock)
        self.late = 0
        """Exchanges so far that came after their lag."""
        self._waits: deque[float] = deque(maxlen=LATE_ROUNDS)
        self._rounds: deque[_RoundCost] = deque(maxlen=LATE_ROUNDS)
        # When the last exchange was applied, and after how many inner steps.
        self._over: tuple[float, int] | None = None
        # The members of the last exchange, this node included.
        self._group: tuple[str, ...] = ()

    def on_round(self, info: RoundInfo, wait_s: float, sent: int = 0) -> None:
        """Note an exchange that was applied; training stood still for ``wait_s`` seconds since the
        one before, and this node sent ``sent`` bytes of all kinds.
        """
        self.late += info.late
        now = self._said.clock()
        over = self._over
        self._over = now, info.step
        if self._speeds is not None and info.members != self._group:
            # What was waited for before may be due to members that are gone.
            self._rounds.clear()
            self._waits.clear()
        self._group = info.members
        was_late = len(info.members) > 1 and wait_s > WAITED_S
        if was_late and over is not None:
            computing_s = now - over[0] - wait_s
            self._rounds.append(_RoundCost(sent, computing_s, wait_s, info.step - over[1]))
        else:
            self._rounds.clear()
        if was_late and self._opt.lag_auto and self._opt.lag >= self._opt.schedule.every:
            self._waits.append(wait_s)
        else:
            self._waits.clear()

    def news(self) -> list[Notice]:
        """Return a sentence, once each, if training waits for a slower member, or because the link
        does not carry the settings: exchanges take longer than a round's computing.
        """
        if max(len(self._rounds), len(self._waits)) < LATE_ROUNDS:
            return []
        if self._speeds is not None and isinstance(self._opt.length, Steps):
            speeds = self._speeds(self._group)
            if speeds is None:
                # What the waits are due to is seen once all have announced their speeds.
                return []
            if self._follow_from(speeds):
                return self._once("member", self._slow_member(speeds) if speeds.uneven else "")
        return self._once("link", self._too_slow() or self._too_long())

    def _once(self, subject: str, sentence: str) -> list[Notice]:
        return [Notice("lag", sentence)] if sentence and self._said.due(subject) else []

    def _follow_from(self, speeds: GroupSpeeds) -> bool:
        """Return whether the recent waits are mostly for a member that makes fewer steps a
        second.
        """
        steps = sum(one.steps for one in self._rounds)
        waited_s = sum(one.waited_s for one in self._rounds)
        behind_s = steps * (1 / speeds.slowest - 1 / speeds.own)
        return behind_s >= MOST_OF_WAIT * waited_s

    def _slow_member(self, speeds: GroupSpeeds) -> str:
        computing_s = sum(one.computing_s for one in self._rounds)
        waited_s = sum(one.waited_s for one in self._rounds)
        return (
            f"{speeds.slowest_name} is slow: an inner step takes it {duration(1 / speeds.slowest)} "
            f"and this node {duration(1 / speeds.own)}, and all wait for the slowest in every "
            f"round, so this node computes {100 * computing_s / (computing_s + waited_s):.0f} % of "
            "the time: free its processor, or begin the swarm again with `--round seconds:auto`, "
            "in which nobody waits for it, with this method or, as `shoal plan --uneven` advises, "
            "with pairs (`--method noloco`)."
        )

    def _too_long(self) -> str:
        if len(self._waits) < LATE_ROUNDS:
            return ""
        waited_s = sum(self._waits) / LATE_ROUNDS
        return (
            "Exchanges take this node longer than a round, so training waits for each "
            f"({waited_s:.2g} s recently): longer rounds ({self._longer()}) or "
            "a smaller codec (outer.codec) would end that, more fragments would not; `shoal "
            "plan` shows which settings fit this link."
        )

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
