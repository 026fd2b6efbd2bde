"""Successive halving (Jamieson and Talwalkar, 1502.07943): all candidates train for a short time,
the better half of them twice as long, and so on.

    search = Halving(candidates, present)
    while search.candidates:
        search.add([train(candidate) for candidate in search.candidates])
    search.best

Each trial begins with the first weights, so that its learning-rate schedule ends with it, as that
of a whole run does, and one model is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LAST_RUNG = 3
"""Candidates, or fewer, that are compared for the last time."""


@dataclass(frozen=True)
class Candidate:
    """A learning rate, and a batch size if the task has one."""

    rate: float
    batch: int | None = None

    def __str__(self) -> str:
        batch = "" if self.batch is None else f", batch {self.batch}"
        return f"rate {self.rate:g}{batch}"


@dataclass(frozen=True)
class Trial:
    """A candidate that was trained for some steps."""

    candidate: Candidate
    steps: int
    loss: float | None
    """Held-out, nats; None: it was not finite any more."""


class Halving:
    """The rungs of a search: lists of trials that took equally long.

    ``present``, the candidate that the settings have now, stays to the end unless it diverges: what
    the best one gains over it is then known at every length.
    """

    def __init__(self, candidates: Sequence[Candidate], present: Candidate) -> None:
        self.candidates = list(candidates)
        """Those of the next rung; empty: the search is over."""
        self.rungs: list[list[Trial]] = []
        self._present = present
        self._sizes = rung_sizes(len(candidates))

    def add(self, trials: Sequence[Trial]) -> None:
        """Note the trials of all ``candidates``, and choose those of the next rung."""
        self.rungs.append(sorted(trials, key=_worst_last))
        finite = [trial.candidate for trial in self.rungs[-1] if trial.loss is not None]
        self._sizes = self._sizes[1:]
        if not self._sizes:
            self.candidates = []
            return
        kept = finite[: self._sizes[0]]
        if self._present in finite and self._present not in kept:
            kept.append(self._present)
        self.candidates = kept

    def stop(self, trials: Sequence[Trial] = ()) -> None:
        """End the search with the ``trials`` of a rung that was not finished.

        Two or more count, but in the first rung: the best of the rung before is the first of them.
        """
        self.candidates = []
        is_finite = any(trial.loss is not None for trial in trials)
        if self.rungs and len(trials) > 1 and is_finite:
            self.rungs.append(sorted(trials, key=_worst_last))

    @property
    def best(self) -> Trial | None:
        """The best trial of the longest rung; None: there is none that did not diverge."""
        if not self.rungs or self.rungs[-1][0].loss is None:
            return None
        return self.rungs[-1][0]

    def compared(self) -> tuple[Trial, Trial] | None:
        """Return the trials of the best and the present candidate in the longest rung that has
        both.
        """
        for trials in reversed(self.rungs):
            best = trial_of(trials, self.rungs[-1][0].candidate)
            present = trial_of(trials, self._present)
            if best is not None and present is not None:
                return best, present
        return None

    def units_left(self) -> int:
        """Return the time of all trials to come, in units of one of the next rung."""
        units = len(self.candidates)
        length = 1
        for size in self._sizes[1:]:
            length *= 2
            units += (size + 1) * length  # the present candidate too
        return units


def rung_sizes(count: int) -> list[int]:
    """Return how many of ``count`` candidates are in each rung, without the present one that is
    kept.
    """
    sizes = [count]
    while sizes[-1] > LAST_RUNG:
        sizes.append((sizes[-1] + 1) // 2)
    return sizes


def trial_of(trials: Sequence[Trial], candidate: Candidate) -> Trial | None:
    """Return the trial of ``candidate``; None: it is not in this rung."""
    return next((trial for trial in trials if trial.candidate == candidate), None)


def _worst_last(trial: Trial) -> float:
    return float("inf") if trial.loss is None else trial.loss
