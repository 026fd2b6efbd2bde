"""The command ``shoal pull``. Heavy imports happen inside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from shoal.node.cli.options import json_option, logging_option, waiting
from shoal.node.console import dumps


@click.command(short_help="Download a swarm's weights without joining it.")
@click.argument("link")
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder to write into.",
)
@click.option(
    "--task", "hooks", metavar="MODULE:CLASS|FILE.py:CLASS", help="Your copy of the swarm's task."
)
@click.option(
    "--evaluate",
    is_flag=True,
    help="Compute the held-out loss of the task here, for the model card.",
)
@click.option(
    "--average",
    is_flag=True,
    help="Take the mean of the newest weights of all members that can be reached.",
)
@click.option("--data", help="Data of --evaluate, for the built-in task: as for `shoal up`.")
@click.option(
    "--max-bytes",
    type=click.IntRange(1),
    default=64 << 30,
    show_default=True,
    help="Most bytes of weights to download.",
)
@click.option("--force", is_flag=True, help="Replace the weights that are in DIR.")
@json_option
@logging_option
def pull(link: str, out: Path, as_json: bool, **options: Any) -> None:
    """Download the weights of the swarm of LINK, without joining it.

    Writes DIR/model.safetensors, and README.md, a model card: how they were trained and how to load
    them. After an interruption it continues where it stopped.

    \b
    Examples:
      shoal pull 'shoal://...' --out weights
      shoal pull 'shoal://...' --out weights --task task.py:Mine --evaluate
      shoal pull 'shoal://...' --out weights --average
    """
    from shoal.node.commands.pull import pull as take
    from shoal.node.commands.pull import summary
    from shoal.node.config.links import read_link

    # Data are of use for an evaluation only.
    options["evaluate"] = options["evaluate"] or options["data"] is not None
    parsed = read_link(link)
    waiting("asking the swarm's peers for their newest weights")
    report = take(parsed, out, say=waiting, **options)
    click.echo(dumps(report) if as_json else summary(report))
