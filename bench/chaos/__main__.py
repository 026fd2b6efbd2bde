"""The command ``python -m bench.chaos``, in the root of the checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from bench.chaos.actor_options import LIES
from shoal.node.cli.main import main
from shoal.node.console import dumps
from shoal.node.exit_code import ExitCode
from shoal.node.logs import log_to_stderr


@click.command(short_help="Train while nodes are killed, and measure the cost.")
@click.option(
    "--peers", type=click.IntRange(2, 64), default=8, show_default=True, help="Nodes to start."
)
@click.option(
    "--minutes",
    type=click.FloatRange(0, min_open=True),
    default=5.0,
    show_default=True,
    help="Minutes to train.",
)
@click.option(
    "--kills-per-minute",
    type=click.FloatRange(0),
    default=2.0,
    show_default=True,
    help="Nodes killed with -9 per minute.",
)
@click.option(
    "--stops-per-minute",
    type=click.FloatRange(0),
    default=0.5,
    show_default=True,
    help="Nodes stopped for seconds, per minute.",
)
@click.option(
    "--byzantine",
    type=click.FloatRange(0, 1),
    default=0.0,
    show_default=True,
    help="Share of the nodes that send false weights.",
)
@click.option(
    "--lie",
    type=click.Choice(LIES),
    default=LIES[0],
    show_default=True,
    help="False data that those nodes send.",
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Seed of the plan, and of the training.",
)
@click.option(
    "--unharmed/--no-unharmed",
    default=True,
    show_default=True,
    help="First train as long without faults, to compare.",
)
@click.option(
    "--step-seconds",
    type=click.FloatRange(0),
    default=0.1,
    show_default=True,
    help="Least duration of an inner step, so that many nodes fit on few cores; 0: no limit.",
)
@click.option(
    "--every", type=click.IntRange(1), default=25, show_default=True, help="Inner steps in a round."
)
@click.option(
    "--checkpoint-every",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="Rounds between two checkpoints.",
)
@click.option(
    "--method", metavar="METHOD", help="How to average, as for shoal demo.  [default: noloco]"
)
@click.option(
    "--codec", metavar="CODEC", help="Number format on the wire.  [default: the method's]"
)
@click.option(
    "--robust", metavar="RULE", help="Defence: clipped-gossip or centered-clip.  [default: none]"
)
@click.option(
    "--set",
    "assigned",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a setting of examples/swarm.toml.",
)
@click.option(
    "--task",
    "hooks",
    metavar="text|MODULE:CLASS|FILE.py:CLASS",
    default="text",
    help="The task to train.",
)
@click.option(
    "--option",
    "task_options",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set an option of the task, such as width=256.",
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
    help="Keep the nodes' folders and logs here.  [default: a temporary one]",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on the last line of stdout."
)
@click.option("--verbose", is_flag=True, help="Let the nodes log what the network does.")
def chaos(
    as_json: bool,
    verbose: bool,
    assigned: tuple[str, ...],
    method: str | None,
    codec: str | None,
    robust: str | None,
    **options: Any,
) -> int:
    """Train with real nodes on this machine while they are killed and stopped, and measure the
    cost.

    The seed decides which node is killed when; nodes return with the same key. The exit code is 3
    if a node ended by itself, did not return or did not end when asked, or if anything was left
    behind. The unharmed run doubles the duration.
    """
    log_to_stderr(verbose)
    from bench.chaos.report import run_chaos, summary
    from shoal.node.config.settings import assignment

    named = {"outer.method": method, "outer.codec": codec, "outer.robust": robust}
    outer = {
        **dict(map(assignment, assigned)),
        **{key: value for key, value in named.items() if value is not None},
    }
    report = run_chaos(outer=outer, verbose=verbose, **options)
    click.echo(dumps(report) if as_json else summary(report))
    return int(ExitCode.SWARM_FAILED if report["troubles"] else ExitCode.OK)


if __name__ == "__main__":
    main(chaos)
