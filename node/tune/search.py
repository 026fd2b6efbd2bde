"""A search in a stated time: trials of all candidates, by successive halving, each as long as the
time left allows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.node.tune.halving import Candidate, Halving, Trial
from shoal.node.tune.knobs import Knobs, TuneError
from shoal.node.tune.trial import Speed, measure, train
from shoal.node.user_code import out_of_memory
from shoal.swarm.figures import duration

if TYPE_CHECKING:
    import torch

    from shoal.node.config.settings import Settings

LEAST_STEPS = 10
"""Of the shortest trials: fewer say nothing."""
PLANNED = 0.95
"""Share of the time left that trials are planned to take: some take longer than the last one."""


class _TimeOverError(Exception):
    """The stated time is over, in the middle of a trial."""


class Search:
    """One search in the ``minutes`` since ``began`` by ``clock``. ``log`` gets a line for each
    trial.
    """

    def __init__(
        self,
        settings: Settings,
        knobs: Knobs,
        device: torch.device,
        minutes: float,
        *,
        began: float,
        log: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self.device = device
        self.halving = Halving(knobs.candidates(settings.train.accumulate), knobs.present)
        self.seconds: list[float] = []
        """Planned for a trial, by rung."""
        self.ended = ""
        """Why the search ended before its last trial, for people."""
        self.interrupted = False
        """By Ctrl-C."""
        self._settings = settings
        self._knobs = knobs
        self._minutes = minutes
        self._log = log
        self._clock = clock
        self._end = began + 60 * minutes
        self._speeds: dict[int | None, Speed] = {}
        self._trials: list[Trial] = []
        """Of the rung that is under way."""
        self._batches_end = 0

    def run(self) -> None:
        """Search to the end, or until the time is over or Ctrl-C."""
        try:
            self._measure()
            while self.halving.candidates:
                self._rung()
        except _TimeOverError:
            self.halving.stop(self._trials)
            self.ended = (
                f"The {self._minutes:g} minutes were over before the last trials: another program "
                "may have slowed this one down."
            )
        except KeyboardInterrupt:
            self.halving.stop(self._trials)
            self.interrupted = True
            self.ended = "Stopped by Ctrl-C: this is what was found until then."

    def _measure(self) -> None:
        """Measure each batch size, and leave out those that memory is too small for."""
        candidates = self.halving.candidates
        present = self._knobs.present
        # The first time takes longer: it imports, and reads the data.
        measure(self._settings, self.device, self._clock)
        for batch in dict.fromkeys([present.batch, *(one.batch for one in candidates)]):
            settings = self._knobs.applied(self._settings, Candidate(present.rate, batch))
            try:
                self._speeds[batch] = measure(settings, self.device, self._clock)
            except Exception as error:
                if batch == present.batch or not out_of_memory(error):
                    raise
                self._log(f"batch {batch} is left out: it does not fit into memory")
        fitting = [one for one in candidates if one.batch in self._speeds]
        self.halving = Halving(fitting, present)

    def _rung(self) -> None:
        left = PLANNED * (self._end - self._clock())
        seconds = left / self.halving.units_left()
        steps = {batch: speed.steps_in(seconds) for batch, speed in self._speeds.items()}
        if not self.halving.rungs and min(steps.values()) < LEAST_STEPS:
            raise TuneError(
                f"The shortest trials would have {min(steps.values())} steps in {self._minutes:g} "
                f"minutes, too few to compare: give --minutes {self._least_minutes()} or more."
            )
        self.seconds.append(seconds)
        self._log(f"{len(self.halving.candidates)} trials of {duration(seconds)} each:")
        self._trials = []
        for candidate in self.halving.candidates:
            trial = self._trial(candidate, max(LEAST_STEPS, steps[candidate.batch]))
            self._trials.append(trial)
        self.halving.add(self._trials)
        if self._batches_end:
            self.halving.stop()
            self.ended = (
                f"The task's batches ended after {self._batches_end} steps, so no trial can be "
                "longer: let batches(shard) go on without end."
            )

    def _least_minutes(self) -> int:
        seconds = max(one.fixed_s + 1.1 * LEAST_STEPS * one.step_s for one in self._speeds.values())
        measuring = 60 * self._minutes - (self._end - self._clock())
        return int((seconds * self.halving.units_left() / PLANNED + measuring) / 60) + 1

    def _trial(self, candidate: Candidate, steps: int) -> Trial:
        settings = self._knobs.applied(self._settings, candidate)
        began = self._clock()
        outcome = train(settings, steps, self.device, self._stop)
        if outcome.steps == steps:
            # The last trial says best how long the next one takes.
            speed = self._speeds[candidate.batch]
            speed.step_s = max(1e-6, (self._clock() - began - speed.fixed_s) / steps)
        if outcome.batches_ended:
            self._batches_end = outcome.steps
        loss = "diverged" if outcome.loss is None else f"held-out loss {outcome.loss:.4g}"
        self._log(f"  {candidate}: {loss} after {outcome.steps} steps")
        return Trial(candidate, outcome.steps, outcome.loss)

    def _stop(self) -> bool:
        if self._clock() > self._end:
            raise _TimeOverError
        return False
