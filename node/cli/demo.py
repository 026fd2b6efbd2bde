"""The command ``shoal demo``. Heavy imports happen inside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from shoal.node.cli.options import (
    COMPUTING_OPTIONS,
    METRICS_OPTIONS,
    OUTER_OPTIONS,
    RL_OPTIONS,
    computing_options,
    computing_overrides,
    json_option,
    metrics_options,
    metrics_overrides,
    option_option,
    outer_options,
    outer_overrides,
    rl_options,
    task_option,
)
from shoal.node.exit_codes import ExitCode
from shoal.node.help import HelpfulCommand
from shoal.node.json_output import dumps
from shoal.node.logs import log_to_stderr


@click.command(cls=HelpfulCommand, short_help="Train with several real nodes on this machine.")
@click.option("--peers", type=click.IntRange(1, 64), default=4, show_default=True, help="Nodes to start.")
@click.option("--rounds", type=click.IntRange(1), default=40, show_default=True, help="Rounds to train.")
@click.option("--every", type=click.IntRange(1), default=25, show_default=True, help="Inner steps in a round.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of weights, shards and pairing.")
@click.option("--device", default="auto", show_default=True, help="Device of the nodes: auto, cpu, cuda, cuda:1 ..., xpu or mps.")
@click.option("--keep", type=click.Path(path_type=Path), help="Keep the nodes' folders here.  [default: a temporary one]")
@click.option("--no-compare", is_flag=True, help="Leave out training alone, which takes as long again.")
@click.option("--cheat", type=click.IntRange(0, 63), default=0, help="rl, --verify: so many nodes cheat, and are found.")
@task_option("text")
@option_option
@computing_options
@outer_options
@rl_options
@metrics_options
@json_option
@click.option("--verbose", is_flag=True, help="Show what the nodes log.")
def demo(as_json: bool, verbose: bool, no_compare: bool, **options: Any) -> int:
    """Start a swarm of real nodes on this machine, train, and compare with training alone.

    \b
    Examples:
      shoal demo                                  four nodes and a small language model, about a minute
      shoal demo --task task.py:Mine --peers 2    a task of your own
      shoal demo --method diloco --rounds 20      another method
      shoal demo --task rl --verify activations --peers 8 --cheat 2     two nodes cheat, and are banned
    """
    log_to_stderr(verbose)
    outer = {**outer_overrides(options), **metrics_overrides(options), **computing_overrides(options)}
    lost = [
        key for key in outer if key.startswith("node.") and key.removeprefix("node.") not in ("metrics", "tensorboard", "wandb")
    ]
    if lost:
        from shoal.node.config.settings import ConfigError

        raise ConfigError(
            f"A demo gives its nodes settings of their own, so {lost[0]} would do nothing: leave --set {lost[0]} out, or start "
            "nodes with shoal up and shoal join."
        )
    rl = {f"rl.{name}": options.pop(name) for name in RL_OPTIONS}
    own = {name: value for name, value in options.items() if name not in (*OUTER_OPTIONS, *METRICS_OPTIONS, *COMPUTING_OPTIONS)}
    if own["hooks"] == "rl":
        from shoal.node.demo import rl as rl_demo

        del own["hooks"], own["every"]
        report = rl_demo.run_demo(verbose=verbose, more={**outer, **rl}, **own)
        click.echo(dumps(report) if as_json else rl_demo.summary(report))
        return int(ExitCode.OK)
    from shoal.node.config.settings import ConfigError
    from shoal.node.demo.demo import run_demo, summary

    if own.pop("cheat"):
        raise ConfigError("--cheat is for --task rl with --verify activations: leave it out, or give these too.")
    report = run_demo(verbose=verbose, compare=not no_compare, outer=outer, **own)
    click.echo(dumps(report) if as_json else summary(report))
    return int(ExitCode.OK)
