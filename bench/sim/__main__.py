"""The command ``python -m bench.sim``, in the root of the checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from shoal.node.cli.main import main
from shoal.node.console import dumps
from shoal.node.exit_code import ExitCode


@click.command(short_help="Simulate a swarm on a virtual clock.")
@click.argument("file", required=False, type=click.Path(path_type=Path), metavar="[SWARM.TOML]")
@click.option(
    "--peers", metavar="N[,N...]", default="16", show_default=True,
    help="Peers to simulate; of several sizes it also reports how each cost grows.",
)  # fmt: skip
@click.option(
    "--net",
    metavar="lan|wan|home|MS:MBIT",
    default="wan",
    show_default=True,
    help="Network between them.",
)
@click.option(
    "--churn",
    metavar="K/min",
    default="0/min",
    show_default=True,
    help="Peers killed and replaced per minute.",
)
@click.option(
    "--naps",
    metavar="K/min",
    default="0/min",
    show_default=True,
    help="Peers stopped for 1 to 8 seconds per minute.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(0, 10_000, min_open=True),
    help="Virtual minutes.  [default: 2, for several sizes 0.5]",
)
@click.option(
    "--warm-up", type=click.FloatRange(0), default=0.0, show_default=True,
    help="Of the minutes, how many count for no cost: peers begin in step, and fall out of it.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(0), help="Random seed.  [default: train.seed]")
@click.option(
    "--method", metavar="METHOD", help="How to average, as for shoal up.  [default: noloco]"
)
@click.option(
    "--codec", metavar="CODEC", help="Number format on the wire.  [default: the method's]"
)
@click.option(
    "--every", type=int, help="Inner steps between two exchanges.  [default: the method's]"
)
@click.option(
    "--set",
    "assigned",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a setting of examples/swarm.toml, such as outer.wait_s=5.",
)
@click.option(
    "--parameters",
    type=click.IntRange(8, 10_000_000),
    default=2000,
    show_default=True,
    help="Parameters of the toy model.",
)
@click.option(
    "--step-seconds",
    type=click.FloatRange(1e-4, 3600),
    default=0.1,
    show_default=True,
    help="Virtual seconds of an inner step.",
)
@click.option(
    "--uneven",
    type=click.FloatRange(0, 2),
    default=0.2,
    show_default=True,
    help="Deviation of speeds: 0.2 is about 20 %.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on the last line of stdout."
)
def sim(
    file: Path | None,
    as_json: bool,
    method: str | None,
    codec: str | None,
    every: int | None,
    assigned: tuple[str, ...],
    **options: Any,
) -> int:
    """Simulate a swarm on this machine: the real exchanges, on a virtual clock, with a toy model.

    Of SWARM.TOML the tables [outer] and [train] are used, and of [swarm] bucket and epoch_s;
    without it buckets hold 64. The same seed gives the same result. The output and
    docs/simulation.md say what is not simulated.
    """
    from rich.console import Console

    from bench.sim.report import run_sim, summary
    from shoal.node.config.settings import assignment

    named = {"outer.method": method, "outer.codec": codec, "outer.every": every}
    given = {key: value for key, value in named.items() if value is not None}
    found = run_sim(file, overrides={**dict(map(assignment, assigned)), **given}, **options)
    if as_json:
        click.echo(dumps(found))
    else:
        Console(width=None).print(summary(found))
    return int(ExitCode.OK)


if __name__ == "__main__":
    main(sim)
