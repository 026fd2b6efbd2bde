"""The inner optimizer and the schedule of its learning rate, as the swarm's settings name them: the task's own, or torch's."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from shoal.node.task import Task
from shoal.node.training.inner_step import TrainingError
from shoal.node.user_code import calling
from shoal.optim.inner import LR as MUON_LR
from shoal.optim.inner import MOMENTUM as MUON_MOMENTUM
from shoal.optim.inner import WEIGHT_DECAY as MUON_WEIGHT_DECAY
from shoal.optim.inner import Split, muon, split
from shoal.swarm.manifest import TrainSettings

LR, WEIGHT_DECAY, BETAS = 3e-4, 0.01, (0.9, 0.99)
ADAMW_KNOBS = ("lr", "weight_decay")
MUON_KNOBS = (*ADAMW_KNOBS, "adamw_lr", "momentum")
LAST = 0.1  # of the peak: where a cosine ends
DECAY = 0.2  # of the steps: the end of warm-up-stable-decay
RATES = ("lr", "initial_lr")
"""Settings of a parameter group that every scheduler sets."""


def resolved(train: TrainSettings) -> TrainSettings:
    """Return the settings with the inner optimizer's defaults written out, as a new manifest has them: versions may differ."""
    if train.optimizer == "task":
        return train
    if train.optimizer == "muon":
        lr = MUON_LR if train.lr is None else train.lr
        usual = {"lr": lr, "adamw_lr": lr, "momentum": MUON_MOMENTUM, "weight_decay": MUON_WEIGHT_DECAY}
    else:
        usual = {"lr": LR, "weight_decay": WEIGHT_DECAY}
    return train.model_copy(update={name: value for name, value in usual.items() if getattr(train, name) is None})


def make_inner(task: Task, train: TrainSettings, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of the inner steps of ``model``, over the parameters that require a gradient.

    TrainingError if Muon finds no matrix in it, or torch has no Muon.
    """
    train = resolved(train)
    params = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if train.optimizer == "task":
        return task.inner_optimizer(params)
    if train.optimizer == "muon":
        with _explained():
            return muon(model, matrices=task.hidden_matrices(model), **{name: getattr(train, name) for name in MUON_KNOBS})
    # The fused kernel halves the optimizer's time on the CPU; elsewhere torch chooses.
    fused = True if all(p.device.type == "cpu" for p in params) else None
    return torch.optim.AdamW(params, betas=BETAS, fused=fused, **{name: getattr(train, name) for name in ADAMW_KNOBS})


def parameter_split(task: Task, train: TrainSettings, model: torch.nn.Module) -> Split | None:
    """Return which parameters of ``model`` Muon and AdamW train; None with another optimizer. TrainingError as `make_inner`."""
    if train.optimizer != "muon":
        return None
    with _explained():
        return split(model, task.hidden_matrices(model))


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise TrainingError(f"The optimizer muon cannot train this model: {error}.") from error


def make_scheduler(task: Task, train: TrainSettings, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    """Return the schedule, to be stepped after each inner step; None: the rate stays.

    TrainingError if it leads to an end, and this node's run has none.
    """
    if train.schedule == "task":
        return task.lr_scheduler(optimizer, train.steps)
    if train.schedule in ("cosine", "wsd") and not train.steps:
        raise TrainingError(f"The schedule {train.schedule} leads to an end, and this node's run has none: leave --steps 0 out.")
    if train.schedule == "constant" and not train.warmup:
        return None
    return LambdaLR(optimizer, factor(train.schedule, train.warmup, train.steps))


def factor(schedule: str, warmup: int, steps: int) -> Callable[[int], float]:
    """Return the learning rate as a fraction of its peak, by the number of steps done: a line up, then what ``schedule`` says.

    A function, and no object with a state: a resumed run has the length that its settings give it now.
    """
    rise = min(warmup, steps // 2) if steps else warmup
    decay = max(round(DECAY * steps), 1)

    def fraction(step: int) -> float:
        if step < rise:
            return (step + 1) / rise
        if schedule == "cosine":
            progress = min(1.0, (step - rise) / max(1, steps - rise))
            return LAST + (1.0 - LAST) * 0.5 * (1.0 + math.cos(math.pi * progress))
        if schedule == "wsd":
            return min(1.0, max(0.0, (steps - step) / decay))
        return 1.0

    return fraction


class Schedule:
    """The schedule of a run: its scheduler, the length that it was made for, and how far it has come.

    A schedule is taken for a function of the number of its steps, as all of torch's are that `Trainer` can step. So one of another
    length comes to the same place by as many steps. After its length the rate stays: some schedulers would rise again, or raise.

    Args:
        optimizer: with the parameter groups of the inner one, before any step.
        length: inner steps from the start to the end of the schedule; 0: it has no end.
    """

    def __init__(self, task: Task, train: TrainSettings, optimizer: torch.optim.Optimizer, length: int) -> None:
        self._task, self._optimizer, self.length = task, optimizer, length
        before = self._groups()
        self.scheduler = make_scheduler(task, train.model_copy(update={"steps": length}), optimizer)
        self._start = copy.deepcopy(self._groups())
        self._set = {*RATES, *_changed(before, self._start)}
        self._made = copy.deepcopy(self.fields())
        self.done = 0
        """Steps of the schedule."""

    def _groups(self) -> list[dict[str, Any]]:
        return [{name: value for name, value in group.items() if name != "params"} for group in self._optimizer.param_groups]

    def fields(self) -> dict[str, Any] | None:
        """Return the scheduler's state without its functions; None if the rate stays."""
        return None if self.scheduler is None else plain(self.scheduler.state_dict())

    def step(self) -> None:
        """Go on by one inner step."""
        if 0 < self.length <= self.done:
            return
        if self.scheduler is not None:
            with calling(self._task, "the scheduler of lr_scheduler()"):
                self.scheduler.step()
        self.done += 1

    def forward(self, step: int) -> None:
        """Go on to ``step``, at most to the end; an earlier one changes nothing."""
        step = min(step, self.length) if self.length else step
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that the optimizer has not stepped yet
            if type(self.scheduler) is LambdaLR and step > self.done:  # its rate follows from the number alone
                self.scheduler.last_epoch, self.scheduler._step_count = step - 1, step
                self.done = step - 1
            if self.scheduler is None:
                self.done = max(self.done, step)
            while self.done < step:
                before = self._groups()
                self.step()
                self._set |= _changed(before, self._groups())

    def state_dict(self) -> dict[str, Any]:
        return {"length": self.length, "made": self._made, "done": self.done}

    def resume(self, saved: Mapping[str, Any] | None, about: Mapping[str, Any]) -> bool:
        """Go on from a run's ``fields`` and ``state_dict``.

        The parameter groups are the saved ones by now. Return False if this is another schedule now, which then goes on from the
        same step. The scheduler must be new.
        """
        done = int(about["done"])
        same = about["length"] == self.length and _equal(about["made"], self._made)
        if same:
            if self.scheduler is not None and saved is not None:
                self.scheduler.load_state_dict(copy.deepcopy(dict(saved)))
            self.done = done
            return True
        kept = self._groups()
        for group, start in zip(self._optimizer.param_groups, copy.deepcopy(self._start), strict=True):
            group.update(start)
        self.forward(done)
        for group, values in zip(self._optimizer.param_groups, kept, strict=True):
            group.update({name: value for name, value in values.items() if name not in self._set})
        return same


def _changed(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> set[str]:
    """Return the settings that any of the groups has anew, or otherwise."""
    both = zip(before, after, strict=True)
    return {name for old, new in both for name, value in new.items() if name not in old or not _equal(old[name], value)}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def plain(value: Any) -> Any:
    """Return a scheduler's state without its functions: a checkpoint cannot hold them, and the task makes them anew."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if not callable(item)}
    if isinstance(value, list | tuple):
        return type(value)(plain(item) for item in value if not callable(item))
    return value
