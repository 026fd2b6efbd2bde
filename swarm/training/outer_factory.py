"""From the swarm's settings to the outer optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shoal.optim import Exchange, OuterOptimizer, RoundInfo, RoundLength, by_rate, by_tokens, codec_named, equal, method_named
from shoal.swarm.errors import ShoalError
from shoal.swarm.manifest.manifest import OuterSettings

WEIGHTS = {"equal": equal, "tokens": by_tokens, "rate": by_rate}


class OuterError(ShoalError):
    """Settings of the outer optimizer that do not fit together, or not this model."""


def make_outer(
    settings: OuterSettings,
    inner: torch.optim.Optimizer,
    exchange: Exchange,
    *,
    model: torch.nn.Module | None,
    slow_device: torch.device,
    length: RoundLength | None = None,
    on_round: Callable[[RoundInfo], None] | None = None,
) -> OuterOptimizer:
    """The outer optimizer that the settings describe. OuterError, where only the model shows that they cannot be used."""
    method = method_named(settings.method)
    options: dict[str, Any] = {"codec": codec_named(settings.codec)} if settings.codec is not None else {}
    if settings.weighing != method.weights:
        options["weight"] = WEIGHTS[settings.weighing]
    try:
        return method.make(
            inner,
            exchange,
            model=model,
            buffers=settings.buffers,
            slow_device=slow_device,
            length=length,
            on_round=on_round,
            **settings.knobs(),
            **options,
        )
    except ValueError as error:
        raise OuterError(f"The outer settings cannot be used for {settings.method!r}: {error}.") from error
