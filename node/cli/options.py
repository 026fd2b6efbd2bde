"""The options of commands about what is trained, and what this node trains on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

option_option = click.option(
    "--option", "task_options", multiple=True, metavar="KEY=VALUE", help="Option of the task, such as width=256."
)


def task_option(default: str | None) -> Callable[..., Any]:
    """``--task``, or ``--hooks`` as it was called first."""
    shown = "text|rl|MODULE:CLASS|FILE.py:CLASS"
    return click.option("--task", "--hooks", "hooks", metavar=shown, default=default, help="The task to train.  [default: text]")


def data_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds them to a command."""
    options = [
        click.option("--data", help="Text to train on, for the built-in task: files, folders, FILE.jsonl(.gz), or hf:DATASET."),
        click.option("--tokenizer", metavar="NAME|PATH", help="bytes, one on the hub, or ./FOLDER with one.  [default: bytes]"),
        click.option("--shard", metavar="I/N", help="Part of the data to train on; by default the least used."),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def data_overrides(flags: dict[str, Any]) -> dict[str, Any]:
    """What they say, as dotted settings; those not given are None."""
    from shoal.node.config.settings import assignment

    own = {f"task.options.{key}": value for key, value in map(assignment, flags.get("task_options", ()))}
    if flags["tokenizer"] is not None:
        own["task.options.tokenizer"] = flags["tokenizer"]
    return {"node.data": flags["data"], "node.shard": flags["shard"], **own}


def limit_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds them to a command."""
    options = [
        click.option("--allow", multiple=True, metavar="ID|FILE", help="Meet these peers only."),
        click.option("--deny", multiple=True, metavar="ID|FILE", help="Do not meet these peers."),
        click.option("--upload", type=float, metavar="MBIT", help="Send at most so many megabits a second.  [default: no limit]"),
        click.option("--ram", type=float, metavar="GB", help="Train only what fits into so much memory.  [default: no limit]"),
        click.option("--disk", type=float, metavar="GB", help="Let the folder hold so many gigabytes.  [default: no limit]"),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def limit_overrides(flags: dict[str, Any]) -> dict[str, Any]:
    """What they say, as dotted settings; those not given are None."""
    return {
        "peers.allow": list(flags["allow"]) or None,
        "peers.deny": list(flags["deny"]) or None,
        "node.upload": flags["upload"],
        "node.ram": flags["ram"],
        "node.disk": flags["disk"],
        "swarm.invite_only": flags.get("invite_only"),
    }


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
