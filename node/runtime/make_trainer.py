"""The trainer that the settings ask for, in this process alone or on the ranks of the node."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from pydantic import ValidationError

from shoal.node.config.settings import ConfigError, Settings
from shoal.node.runtime.join import make_task
from shoal.node.training import resources
from shoal.node.training.schedule import parameter_split
from shoal.node.training.trainer import Trainer
from shoal.node.training.uncompiled import without_compiler
from shoal.optim import RoundInfo
from shoal.swarm.manifest.outer import OuterSettings

if TYPE_CHECKING:
    from shoal.node.parallel.ranks import NodeRanks


def with_own_lag(settings: Settings) -> Settings:
    """Return the settings with this node's own lag in place of the swarm's, if it has one.

    Raises:
        ConfigError: the swarm's method has no lag, or its rounds are too short for this one.
    """
    lag = settings.node.lag
    if lag is None:
        return settings
    try:
        outer = OuterSettings.model_validate({**settings.outer.resolved().model_dump(), "lag": lag})
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(f"The setting node.lag={lag!r} cannot be used in this swarm: {problem}.") from None
    return settings.model_copy(update={"outer": outer})


def make_trainer(
    settings: Settings,
    device: torch.device,
    ranks: NodeRanks | None,
    log: Callable[[str], None],
    on_round: Callable[[RoundInfo], None],
    speeds: Callable[[], Iterable[float]],
) -> Trainer:
    """Return the trainer. ``log`` gets sentences for the user; the rest is as for ``Trainer``.

    Raises:
        ShoalError: the task, its model, or this node's own lag cannot be used; for the task's own errors see `make_task`.
    """
    settings = with_own_lag(settings)
    node, method, train = settings.node, settings.outer.method, settings.train
    on_device = node.slow_on_device
    slow_here = node.offload is None and (not on_device or device.type == "cpu")

    def check(params: list[torch.nn.Parameter]) -> None:
        resources.check(node.ram, params, log, method=method, slow_here=slow_here)

    task = make_task(settings)
    if ranks is not None:
        made: Trainer = ranks.make_trainer(
            task, settings, slow_on_device=on_device, on_model=check, on_round=on_round, speeds=speeds
        )
    else:
        if not train.compile:
            without_compiler()
        made = Trainer(
            task, settings.outer, train, own=train, device=device, slow_on_device=on_device, offload=node.offload, on_model=check,
            on_round=on_round, speeds=speeds,
        )  # fmt: skip
    found = parameter_split(task, train, made.model)
    if found is not None:
        log(f"{found}.")
    return made
