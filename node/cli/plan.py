"""The command ``shoal plan``. Heavy imports happen inside it."""

from __future__ import annotations

from typing import Any

import click

from shoal.node.cli.options import json_option, waiting
from shoal.node.console import dumps


@click.command(short_help="Show which method and settings suit a link.")
@click.option(
    "--params", type=float, required=True, help="Parameters that are averaged, such as 135e6."
)
@click.option("--step", type=float, required=True, help="Seconds of an inner step.")
@click.option(
    "--mbit", type=float, help="Megabits a second that the link carries, in its slower direction."
)
@click.option("--rtt", type=float, help="Seconds of a round trip to the other peers.")
@click.option(
    "--measure",
    metavar="LINK",
    help="Measure the link to a member of this swarm, without joining it.",
)
@click.option("--peers", type=int, default=8, show_default=True, help="Peers of the swarm.")
@click.option(
    "--uneven",
    is_flag=True,
    help="Advise for machines of which the slowest has less than 0.85 of the mean speed.",
)
@click.option("--public", is_flag=True, help="Advise for a swarm that strangers may join.")
@click.option("--every", type=int, help="Inner steps in a round.  [default: the method's]")
@click.option("--steps", type=int, help="Say what so many inner steps take and send.")
@json_option
def plan(as_json: bool, **numbers: Any) -> None:
    """Show, for each method and codec, how much a node would compute over a link, its bytes and
    memory, and which method to choose, with settings to copy.

    \b
    Examples:
      shoal plan --params 135e6 --step 0.5 --mbit 100 --rtt 0.1 --steps 2000
      shoal plan --params 135e6 --step 0.5 --measure 'shoal://...'
    """
    if numbers["measure"] is not None:
        waiting("measuring the link")
    from shoal.node.commands.plan import plan as make
    from shoal.node.commands.plan import table

    report = make(**numbers)
    click.echo(dumps(report) if as_json else table(report))
