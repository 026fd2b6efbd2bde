"""The options of ``up``, ``join`` and ``demo`` about who else is shown the metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

METRICS_OPTIONS = ("metrics", "tensorboard", "wandb")


def metrics_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds them to a command."""
    options = [
        click.option("--metrics", metavar="[HOST:]PORT", help="Serve metrics to Prometheus (a demo: at PORT, PORT+1 ...)."),
        click.option("--tensorboard", metavar="DIR", type=click.Path(path_type=Path), help="Also write curves for TensorBoard."),
        click.option("--wandb", metavar="PROJECT", help="Also send curves to Weights & Biases."),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def metrics_overrides(flags: Mapping[str, Any]) -> dict[str, Any]:
    """What they say, as dotted settings; those not given are None."""
    return {f"node.{name}": flags.get(name) for name in METRICS_OPTIONS}
