"""Where the settings have the learning rate and the batch size of a task, and what is tried of
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.node.config.settings import Settings
from shoal.node.tasks.loader import option_defaults
from shoal.node.training.inner_optimizer import resolved
from shoal.node.tune.halving import Candidate
from shoal.swarm.errors import ShoalError
from shoal.swarm.settings.training import MAX_LR

RATE_OPTIONS = ("lr", "learning_rate")
BATCH_OPTIONS = ("batch", "batch_size")
"""Names of the arguments of a task's constructor that mean these."""
RATE_FACTORS = tuple(2.0**power for power in range(-3, 5))
"""Of the present rate: AdamW's default of 3e-4 is low for a small model, so more are above it."""
BATCH_FACTORS = (0.5, 1, 2)
TRAIN_RATE = "train.lr"
OPTIONS = "task.options."


class TuneError(ShoalError):
    """There is nothing to tune, or nothing was found."""


@dataclass(frozen=True)
class Knobs:
    """The dotted settings that are tuned, and the values that they have now."""

    rate: str
    batch: str | None
    """None: the task has no batch size, or it is to stay."""
    present: Candidate

    def candidates(self, accumulate: int) -> list[Candidate]:
        """Return what is tried, the lowest rate first; ``accumulate`` must divide a batch."""
        rates = [self.present.rate * factor for factor in RATE_FACTORS]
        if self.rate == TRAIN_RATE:
            rates = [rate for rate in rates if rate <= MAX_LR]
        if self.present.batch is None:
            return [Candidate(rate) for rate in rates]
        found = []
        for factor in BATCH_FACTORS:
            batch = int(self.present.batch * factor)
            if batch >= 1 and batch % accumulate == 0:
                found += [Candidate(rate, batch) for rate in rates]
        return found

    def values(self, candidate: Candidate) -> dict[str, Any]:
        """Return the candidate as dotted settings."""
        batch = {} if self.batch is None else {self.batch: candidate.batch}
        return {**batch, self.rate: candidate.rate}

    def applied(self, settings: Settings, candidate: Candidate) -> Settings:
        """Return ``settings`` with the candidate in them."""
        task = settings.task
        train = settings.train
        for dotted, value in self.values(candidate).items():
            if dotted == TRAIN_RATE:
                train = train.model_copy(update={"lr": value})
            else:
                options = {**task.options, dotted.removeprefix(OPTIONS): value}
                task = task.model_copy(update={"options": options})
        return settings.model_copy(update={"task": task, "train": train})


def find_knobs(settings: Settings, *, keep_batch: bool) -> Knobs:
    """Return where ``settings`` have the rate and the batch.

    Raises TuneError: the rate is in the task's code alone; HookError: the task cannot be loaded.
    """
    options = {**option_defaults(settings.task.hooks), **settings.task.options}
    if settings.train.optimizer == "task":
        name = _named(options, RATE_OPTIONS)
        if name is None:
            raise TuneError(
                f"The task {settings.task.hooks!r} has no positive option 'lr' to begin with: let "
                "inner_optimizer() take its rate from an argument lr of the constructor, set that "
                "by --option lr=1e-3, or choose --set train.optimizer=adamw."
            )
        rate_key = f"{OPTIONS}{name}"
        rate = float(options[name])
    else:
        rate_key = TRAIN_RATE
        found = resolved(settings.train).lr
        assert found is not None
        rate = found
    batch_name = None if keep_batch else _named(options, BATCH_OPTIONS, whole=True)
    if batch_name is None:
        return Knobs(rate_key, None, Candidate(rate))
    return Knobs(rate_key, f"{OPTIONS}{batch_name}", Candidate(rate, options[batch_name]))


def _named(
    options: Mapping[str, Any], names: tuple[str, ...], *, whole: bool = False
) -> str | None:
    """Return the first of ``names`` that is an option with a positive number."""
    kinds = int if whole else (int, float)
    for name in names:
        value = options.get(name)
        if isinstance(value, kinds) and not isinstance(value, bool) and value > 0:
            return name
    return None
