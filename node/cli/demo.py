"""The command ``shoal demo``. Heavy imports happen inside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from shoal.node.cli.options import (
    AVERAGING_FLAGS,
    COMPUTING_FLAGS,
    METRICS_FLAGS,
    OUTPUT,
    RL_FLAGS,
    SET_FLAG,
    TASK_FLAGS,
    SettingsCommand,
    json_option,
    overrides,
    set_option,
)
from shoal.node.console import dumps
from shoal.node.exit_code import ExitCode
from shoal.node.logs import log_to_stderr


@click.command(
    cls=SettingsCommand,
    settings=[TASK_FLAGS, AVERAGING_FLAGS, COMPUTING_FLAGS, RL_FLAGS, METRICS_FLAGS, SET_FLAG],
    short_help="Train with several real nodes on this machine.",
)
@click.option(
    "--peers", type=click.IntRange(1, 64), default=4, show_default=True, help="Nodes to start."
)
@click.option(
    "--rounds", type=click.IntRange(1), default=40, show_default=True, help="Rounds to train."
)
@click.option(
    "--every", type=click.IntRange(1), default=25, show_default=True, help="Inner steps in a round."
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Seed of weights, shards and pairing.",
)
@click.option(
    "--device",
    default="auto",
    show_default=True,
    help="Device of the nodes: auto, cpu, cuda, cuda:1 ..., xpu or mps.",
)
@click.option(
    "--keep",
    type=click.Path(path_type=Path),
    help="Keep the nodes' folders here.  [default: a temporary one]",
)
@click.option(
    "--no-compare", is_flag=True, help="Leave out training alone, which takes as long again."
)
@click.option(
    "--cheat",
    type=click.IntRange(0, 63),
    default=0,
    help="rl, --verify: so many nodes cheat, and are found.",
)
@set_option
@json_option
@click.option("--verbose", is_flag=True, help="Show what the nodes log.")
def demo(as_json: bool, no_compare: bool, every: int, cheat: int, **flags: Any) -> int:
    """Start a swarm of real nodes on this machine, train, and compare with training alone.

    \b
    Examples:
      shoal demo                                  four nodes and a small language model, about a
                                                  minute
      shoal demo --task task.py:Mine --peers 2    a task of your own
      shoal demo --method diloco --rounds 20      another method
      shoal demo --task rl --verify 1 --peers 8 --cheat 2     two nodes cheat, and are banned
    """
    log_to_stderr(flags["verbose"])
    from shoal.node.config.settings import ConfigError

    given = overrides(flags)
    for key in given:
        if key.startswith("node.") and key not in METRICS_FLAGS[OUTPUT]:
            raise ConfigError(
                f"A demo gives its nodes settings of their own, so {key} would do nothing: leave "
                f"--set {key} out, or start nodes with shoal up and shoal join."
            )
    own = {name: value for name, value in flags.items() if "." not in name and name != "assigned"}
    if given.get("task.hooks") == "rl":
        from shoal.node.demo import rl_demo

        report = rl_demo.run_demo(cheat=cheat, more=given, **own)
        summary: Callable[[dict[str, Any]], str] = rl_demo.summary
    elif cheat:
        raise ConfigError(
            "--cheat is for --task rl with --verify 1: leave it out, or give these too."
        )
    else:
        from shoal.node.demo import training_demo

        report = training_demo.run_demo(every=every, compare=not no_compare, more=given, **own)
        summary = training_demo.summary
    click.echo(dumps(report) if as_json else summary(report))
    return int(ExitCode.TRAINED_ALONE if report["trained_alone"] else ExitCode.OK)
