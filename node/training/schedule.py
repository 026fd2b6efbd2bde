"""The inner optimizer and the schedule of its learning rate, as the swarm's settings name them: the task's own, or torch's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from shoal.node.task import Task
from shoal.node.training.errors import TrainingError
from shoal.optim.inner.muon import LR as MUON_LR
from shoal.optim.inner.muon import MOMENTUM as MUON_MOMENTUM
from shoal.optim.inner.muon import WEIGHT_DECAY as MUON_WEIGHT_DECAY
from shoal.optim.inner.muon import muon
from shoal.optim.inner.split import Split, split
from shoal.swarm.manifest.outer import TrainSettings

LR, WEIGHT_DECAY, BETAS = 3e-4, 0.01, (0.9, 0.99)
ADAMW_KNOBS = ("lr", "weight_decay")
MUON_KNOBS = (*ADAMW_KNOBS, "adamw_lr", "momentum")
LAST = 0.1  # of the peak: where a cosine ends
DECAY = 0.2  # of the steps: the end of warm-up-stable-decay


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
