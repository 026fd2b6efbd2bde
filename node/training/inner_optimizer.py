"""The optimizer of the inner steps: AdamW, Muon, or the task's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shoal.node.task import Task
from shoal.node.training.training_error import TrainingError
from shoal.optim.inner import LR as MUON_LR
from shoal.optim.inner import WEIGHT_DECAY as MUON_WEIGHT_DECAY
from shoal.optim.inner import Split, muon, split
from shoal.optim.outer.inner import all_parameters
from shoal.optim.parameters import AveragedParameters
from shoal.swarm.settings.training import TrainSettings

ADAMW_LR = 3e-4
ADAMW_WEIGHT_DECAY = 0.01
ADAMW_BETAS = (0.9, 0.99)
KNOBS = ("lr", "weight_decay")
"""Settings that AdamW and Muon are made with."""


def resolved(train: TrainSettings) -> TrainSettings:
    """Return the settings with the inner optimizer's defaults written out, as a new manifest has
    them: versions may differ.
    """
    if train.optimizer == "task":
        return train
    if train.optimizer == "muon":
        usual = {"lr": MUON_LR, "weight_decay": MUON_WEIGHT_DECAY}
    else:
        usual = {"lr": ADAMW_LR, "weight_decay": ADAMW_WEIGHT_DECAY}
    missing = {name: value for name, value in usual.items() if getattr(train, name) is None}
    return train.model_copy(update=missing)


def make_inner(task: Task, train: TrainSettings, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of the inner steps of ``model``, over the parameters that require a
    gradient.

    TrainingError if Muon finds no matrix in it, or torch has no Muon; or if the task's own
    optimizer trains others than those.
    """
    train = resolved(train)
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    params = [param for _, param in trained]
    if train.optimizer == "task":
        given: Any = trained if task.optimizer_takes_names() else params
        return _checked(AveragedParameters.of(model), task.inner_optimizer(given))
    knobs = {name: getattr(train, name) for name in KNOBS}
    if train.optimizer == "muon":
        with _explained():
            return muon(model, matrices=task.hidden_matrices(model), **knobs)
    # The fused kernel halves the optimizer's time on the CPU; elsewhere torch chooses.
    on_cpu = all(parameter.device.type == "cpu" for parameter in params)
    fused = True if on_cpu else None
    return torch.optim.AdamW(params, betas=ADAMW_BETAS, fused=fused, **knobs)


def _checked(averaged: AveragedParameters, inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the task's optimizer.

    TrainingError unless it trains the parameters that are averaged, and no others.
    """
    lacking, more = averaged.compared(all_parameters(inner))
    if lacking:
        count = len(averaged)
        raise TrainingError(
            f"The task's inner_optimizer() trains {count - len(lacking)} of the {count} parameters "
            f"that require a gradient, and not {lacking[0]}: let it train all that it is given, or "
            "freeze the rest in model() (requires_grad_(False))."
        )
    trained = [parameter for parameter in more if parameter.requires_grad]
    if trained:
        raise TrainingError(
            f"The task's inner_optimizer() trains {len(trained)} parameters that are not its "
            f"model's, such as one of shape {tuple(trained[0].shape)}: make them part of what "
            "model() returns."
        )
    return inner


def parameter_split(task: Task, train: TrainSettings, model: torch.nn.Module) -> Split | None:
    """Return which parameters of ``model`` Muon and AdamW train; None with another optimizer.

    TrainingError as `make_inner`.
    """
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
