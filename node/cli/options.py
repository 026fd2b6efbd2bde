"""The options of commands about what is trained, and what this node trains on."""

from __future__ import annotations

from collections.abc import Callable
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
