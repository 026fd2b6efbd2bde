"""The learning-rate schedule of a run, which survives a resume, another length, and a change of the
swarm's rate.

    schedule = Schedule(task, train, optimizer, length=1000)
    schedule.step()        # after each inner step
    schedule.forward(500)  # a node that joins late begins where the others are
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from shoal.node.inner_tensors import same_values
from shoal.node.task import Task
from shoal.node.training.training_error import TrainingError
from shoal.node.user_code import calling
from shoal.swarm.settings.training import TrainSettings

COSINE_END = 0.1
"""Of the peak: where a cosine ends."""
WSD_DECAY = 0.2
"""Of the steps: the end of warm-up-stable-decay, in which the rate falls to 0."""
RATES = ("lr", "initial_lr")
"""Settings of a parameter group that every scheduler sets."""


def make_scheduler(
    task: Task, train: TrainSettings, optimizer: torch.optim.Optimizer
) -> LRScheduler | None:
    """Return the schedule, to be stepped after each inner step; None: the rate stays.

    TrainingError if it leads to an end, and this node's run has none.
    """
    if train.schedule == "task":
        return task.lr_scheduler(optimizer, train.steps)
    if train.schedule in ("cosine", "wsd") and not train.steps:
        raise TrainingError(
            f"The schedule {train.schedule} leads to an end, and this node's run has none: leave "
            "--steps 0 out."
        )
    if train.schedule == "constant" and not train.warmup:
        return None
    return LambdaLR(optimizer, factor(train.schedule, train.warmup, train.steps))


def factor(schedule: str, warmup: int, steps: int) -> Callable[[int], float]:
    """Return the learning rate as a fraction of its peak, by the number of steps done: a line up,
    then what ``schedule`` says.

    A function, and no object with a state: a resumed run has the length that its settings give it
    now.
    """
    rise = min(warmup, steps // 2) if steps else warmup
    decay = max(round(WSD_DECAY * steps), 1)

    def fraction(step: int) -> float:
        if step < rise:
            return (step + 1) / rise
        if schedule == "cosine":
            progress = min(1.0, (step - rise) / max(1, steps - rise))
            return COSINE_END + (1.0 - COSINE_END) * 0.5 * (1.0 + math.cos(math.pi * progress))
        if schedule == "wsd":
            return min(1.0, max(0.0, (steps - step) / decay))
        return 1.0

    return fraction


class Schedule:
    """The schedule of a run: its scheduler, the length that it was made for, and how far it has
    come.

    A schedule is taken for a function of the number of its steps, as all of torch's are that
    `Trainer` can step. So one of another length comes to the same place by as many steps. After its
    length the rate stays: some schedulers would rise again, or raise.

    Args:
        optimizer: with the parameter groups of the inner one, before any step.
        length: inner steps from the start to the end of the schedule; 0: it has no end.
    """

    def __init__(
        self, task: Task, train: TrainSettings, optimizer: torch.optim.Optimizer, length: int
    ) -> None:
        self._task = task
        self._optimizer = optimizer
        self.length = length
        self._train = train
        self._before = copy.deepcopy(self._groups())
        self.scheduler = make_scheduler(task, train.model_copy(update={"steps": length}), optimizer)
        self._start = copy.deepcopy(self._groups())
        self._set = {*RATES, *_changed(self._before, self._start)}
        self._made = copy.deepcopy(self.fields())
        self.done = 0
        """Steps of the schedule."""
        self.factor = 1.0
        """What the rates are multiplied by after the schedule has set them, because the swarm's
        rate was changed.
        """
        self._unscaled: list[float] | None = None
        """The rates of the groups without the factor; None if there is none in them."""

    @property
    def peak(self) -> float:
        """The highest rate of the parameter groups as the inner optimizer was made; 0: no group has
        a rate.
        """
        return max((float(group.get("lr", 0.0)) for group in self._before), default=0.0)

    def scale(self, factor: float) -> None:
        """Multiply the rates by ``factor``, in place of an earlier one, from now on."""
        self._without_factor()
        self.factor = factor
        self._with_factor()

    def resized(self, length: int) -> Schedule:
        """Return the same schedule in another ``length``, at the same step and with the same
        factor. It replaces this one.
        """
        self._without_factor()
        for group, first in zip(self._optimizer.param_groups, self._before, strict=True):
            for name in self._set & first.keys() & group.keys():
                group[name] = copy.copy(first[name])
        made = Schedule(self._task, self._train, self._optimizer, length)
        made.forward(self.done)
        made.done = self.done  # also where the new one ends before
        made.scale(self.factor)
        return made

    def _without_factor(self) -> None:
        if self._unscaled is not None:
            for group, rate in zip(self._optimizer.param_groups, self._unscaled, strict=True):
                _set_rate(group, rate)
            self._unscaled = None

    def _with_factor(self) -> None:
        if self.factor == 1.0 or self._unscaled is not None:
            return
        groups = self._optimizer.param_groups
        self._unscaled = [float(group.get("lr", 0.0)) for group in groups]
        for group, rate in zip(groups, self._unscaled, strict=True):
            _set_rate(group, rate * self.factor)

    def _groups(self) -> list[dict[str, Any]]:
        groups = [dict(group) for group in self._optimizer.param_groups]
        for group in groups:
            del group["params"]
        return groups

    def fields(self) -> dict[str, Any] | None:
        """Return the scheduler's state without its functions; None if the rate stays."""
        if self.scheduler is None:
            return None
        fields: dict[str, Any] = plain(self.scheduler.state_dict())
        return fields

    def step(self) -> None:
        if 0 < self.length <= self.done:
            return
        if self.scheduler is not None:
            self._without_factor()
            with calling(self._task, "the scheduler of lr_scheduler()"):
                self.scheduler.step()
            self._with_factor()
        self.done += 1

    def forward(self, step: int) -> None:
        """Go on to ``step``, at most to the end; an earlier one changes nothing."""
        if self.length:
            step = min(step, self.length)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that the optimizer has not stepped yet
            if type(self.scheduler) is LambdaLR and step > self.done:
                # Its rate follows from the number alone.
                self.scheduler.last_epoch = step - 1
                self.scheduler._step_count = step
                self.done = step - 1
            if self.scheduler is None:
                self.done = max(self.done, step)
            while self.done < step:
                before = self._groups()
                self.step()
                self._set |= _changed(before, self._groups())

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"length": self.length, "made": self._made, "done": self.done}
        if self._unscaled is not None:
            state["unscaled"] = self._unscaled
        return state

    def resume(self, saved: Mapping[str, Any] | None, about: Mapping[str, Any]) -> bool:
        """Go on from a run's ``fields`` and ``state_dict``.

        The parameter groups are the saved ones by now. Return False if this is another schedule
        now, which then goes on from the same step. The scheduler must be new.
        """
        done = int(about["done"])
        self._unscaled = about.get("unscaled")
        self._without_factor()
        same = about["length"] == self.length and same_values(about["made"], self._made)
        if same or (self.scheduler is None and saved is None):  # the rate stays
            if self.scheduler is not None and saved is not None:
                self.scheduler.load_state_dict(copy.deepcopy(dict(saved)))
            self.done = done
            self._with_factor()
            return True
        kept = self._groups()
        groups = self._optimizer.param_groups
        for group, start in zip(groups, copy.deepcopy(self._start), strict=True):
            group.update(start)
        self.forward(done)
        self._without_factor()
        for group, values in zip(groups, kept, strict=True):
            group.update({name: value for name, value in values.items() if name not in self._set})
        self._with_factor()
        return False


def _set_rate(group: dict[str, Any], rate: float) -> None:
    """Set the learning rate of a parameter group, which has a tensor for it if the optimizer was
    made with one.
    """
    if "lr" not in group:
        return
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _changed(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> set[str]:
    """Return the settings that any of the groups has anew, or otherwise."""
    changed = set()
    for old, new in zip(before, after, strict=True):
        for name, value in new.items():
            if name not in old or not same_values(old[name], value):
                changed.add(name)
    return changed


def plain(value: Any) -> Any:
    """Return a scheduler's state without its functions: a checkpoint cannot hold them, and the task
    makes them anew.
    """
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if not callable(item)}
    if isinstance(value, list | tuple):
        return type(value)(plain(item) for item in value if not callable(item))
    return value
