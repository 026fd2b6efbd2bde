"""What a run costs a node: a sentence for people, from a forecast or from the run's own first
steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from shoal.node.plan.rows import ModelTensors, Row, work_of
from shoal.swarm.exchange.cost import FLOAT32, Line, forecast
from shoal.swarm.exchange.cost import sent as sent_a_round
from shoal.swarm.figures import amount, duration
from shoal.swarm.settings.outer import MAX_GROUP, OuterSettings
from shoal.swarm.training.last_average import (
    MAX_GATHERED,
    averages_at_end,
    make_last_screen,
)

DAY_S = 86_400.0
ESTIMATE_AFTER_S = 5.0
"""Of training after which its speed is known."""
ESTIMATE_LATEST_S = 60.0
"""After which an estimate no longer waits for the end of the first round."""
ESTIMATE_STEPS = 10
"""Inner steps from which the speed of training is known."""
UNMEASURED = Line(rate=1e9, round_trip=0.0)
"""Stands for a link in a forecast of which only the bytes are used."""


@dataclass(frozen=True)
class RunCost:
    """What ``steps`` inner steps cost a node; 0: a day of a run without end."""

    steps: int
    seconds: float
    sent: float
    """Bytes, the last average among them, and as many are received."""
    memory: float | None
    """Bytes for averaging, beyond training alone; None: not measured with these settings."""

    def said(self) -> str:
        """Return a sentence without an end for people."""
        if self.steps:
            said = f"{self.steps:,} steps take about {duration(self.seconds)}"
            if self.sent:
                said += f" and send about {amount(self.sent)}, and as much comes back"
        elif self.sent:
            said = f"a day sends about {amount(self.sent)}, and as much comes back"
        else:
            return ""
        if self.memory is not None and self.sent:
            said += f"; averaging takes some {amount(self.memory)} of memory beside training"
        return said


def run_cost(row: Row, *, steps: int, round_s: float | None = None) -> RunCost:
    """Return the cost of ``steps`` inner steps with the settings of ``row``, or of a day (0).

    ``round_s``: seconds of a round as it was measured; None: as forecast.
    """
    a_round = row.forecast.round_s if round_s is None else round_s
    rounds = steps / row.work.every if steps else DAY_S / a_round
    sent = rounds * row.forecast.sent
    if steps:
        sent += last_average_sent(row)
    return RunCost(steps, rounds * a_round, sent, row.memory)


def last_average_sent(row: Row) -> int:
    """Return the bytes that a node sends in the last average, which is of float32 weights; 0 where
    the swarm ends without one.
    """
    if not averages_at_end(row.outer):
        return 0
    gathers = make_last_screen(row.outer).gathers
    weights = replace(
        row.work,
        group="everyone",
        nbytes=FLOAT32 * row.work.params,
        sums=not gathers,
        max_group=MAX_GATHERED if gathers else MAX_GROUP,
        back=0,
    )
    return sent_a_round(weights)


class StartEstimate:
    """What a run will cost, told once its speed is known: from steps that were taken, with all
    waiting.

    ``tensors``: what is averaged; ``done``: steps and rounds at the start of this run.
    """

    def __init__(
        self,
        outer: OuterSettings,
        tensors: ModelTensors,
        done: tuple[int, int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._outer = outer
        self._tensors = tensors
        self._clock = clock
        self._steps, self._rounds = done
        self._began = clock()
        self._told = False

    def news(self, steps: int, rounds: int, *, total: int, peers: int) -> str:
        """Return the estimate, once, at inner step ``steps`` of ``total`` (0: no end) in round
        ``rounds``; nothing before and after.
        """
        steps_done = steps - self._steps
        rounds_done = rounds - self._rounds
        passed = self._clock() - self._began
        if self._told or passed < ESTIMATE_AFTER_S or steps_done < ESTIMATE_STEPS:
            return ""
        if rounds_done < 1 and not self._outer.alone and passed < ESTIMATE_LATEST_S:
            return ""
        self._told = True
        step_s = passed / steps_done
        if self._outer.alone:
            left = max(total - steps, 0)
            return RunCost(left, left * step_s, 0.0, None).said()
        outer = self._outer.resolved()
        if outer.round != "steps":
            # A round has as many steps as fit into it.
            every = max(round(steps_done / max(rounds_done, 1)), 1)
            outer = outer.model_copy(update={"every": every})
        work = work_of(outer, self._tensors, peers=max(peers, 2), step_s=step_s)
        row = Row(outer, self._tensors, work, forecast(work, UNMEASURED))
        if total and total <= steps:
            return ""
        return run_cost(row, steps=total - steps if total else 0, round_s=work.computing_s).said()
