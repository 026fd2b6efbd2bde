"""The command ``shoal tune``. Heavy imports happen inside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from shoal.node.cli.finite_range import FiniteRange
from shoal.node.cli.options import (
    COMPUTING_FLAGS,
    NODE,
    RUN,
    TASK,
    SettingsCommand,
    json_option,
    overrides,
    set_option,
    verbose_option,
)
from shoal.node.console import dumps
from shoal.node.exit_code import ExitCode
from shoal.node.logs import log_to_stderr

TUNE_FLAGS = {
    RUN: ("minutes", "keep_batch", "assigned"),
    TASK: ("task.hooks", "node.data", "task.options.tokenizer", "task.options"),
    NODE: ("node.device", "node.threads"),
}


@click.command(
    cls=SettingsCommand,
    settings=[TUNE_FLAGS, COMPUTING_FLAGS],
    short_help="Find a task's learning rate and batch size.",
)
@click.argument("file", required=False, type=click.Path(path_type=Path), metavar="[SWARM.TOML]")
@click.option(
    "--minutes",
    type=FiniteRange(0, min_open=True),
    default=10.0,
    show_default=True,
    help="Time that it may take in all.",
)
@click.option("--keep-batch", is_flag=True, help="Find the rate alone, at the batch as it is.")
@set_option
@verbose_option
@json_option
def tune(
    file: Path | None,
    minutes: float,
    keep_batch: bool,
    verbose: bool,
    as_json: bool,
    **flags: Any,
) -> int:
    """Find the learning rate with which a task alone learns most in the stated time, and its batch
    size if it has one, and write them into SWARM.TOML.

    Eight rates are tried, from an eighth of the present one to 16 times it, with half, once and
    twice the batch (an option `batch` of the task). All train for an equal time and are compared by
    the task's evaluate(); the better half trains twice as long, from the first weights, and so on.

    The rate is train.lr, or with the task's own optimizer its option lr. All else in SWARM.TOML
    stays; by default it is ./swarm.toml, which need not exist. Ctrl-C ends the search with what was
    found until then.

    \b
    Examples:
      shoal tune --minutes 5                        the built-in task
      shoal tune --task task.py:Mine                in a folder that `shoal init` made
      shoal tune digits.toml --task examples/digits.py:Digits --keep-batch
    """
    log_to_stderr(verbose)
    from shoal.node.commands.tune import table
    from shoal.node.commands.tune import tune as find

    report = find(
        file,
        overrides(flags),
        minutes=minutes,
        keep_batch=keep_batch,
        log=lambda text: click.echo(text, err=True),
    )
    click.echo(dumps(report) if as_json else table(report))
    return int(ExitCode.INTERRUPTED if report["interrupted"] else ExitCode.OK)
