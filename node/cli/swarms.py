"""The command ``shoal swarms``, and joining a public swarm by its name.

Heavy imports happen inside.
"""

from __future__ import annotations

import re
import sys

import click

from shoal.node.cli.options import json_option, logging_option, waiting
from shoal.node.console import dumps

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
"""What a public swarm may be called; anything else is read as a link."""


@click.command(short_help="List the public swarms that bootstrap nodes know.")
@click.option(
    "--seed",
    "seeds",
    multiple=True,
    metavar="MULTIADDR",
    help="Bootstrap node to ask.  [default: those of SHOAL_SEEDS, or of a file]",
)
@json_option
@logging_option
def swarms(seeds: tuple[str, ...], as_json: bool) -> None:
    """List the public swarms that bootstrap nodes know: task, peers, size, bytes a round, and what
    a node needs.

    \b
    Examples:
      shoal swarms --seed /ip4/203.0.113.9/tcp/4001/p2p/12D3KooW...
      shoal join NAME
    """
    from shoal.node.commands.swarms import known_seeds, list_swarms, table

    addresses = known_seeds(seeds)
    waiting("asking the bootstrap nodes")
    listed = list_swarms(addresses)
    click.echo(dumps(listed) if as_json else table(listed))


def link_for(name: str, seeds: tuple[str, ...], yes: bool) -> str:
    """Return the link of the public swarm of that name, after showing it and asking.

    What is no name is returned as it is. Raises ShoalError.
    """
    if NAME.fullmatch(name.strip()) is None:
        return name
    from shoal.node.commands.swarms import chosen, described, known_seeds, list_swarms
    from shoal.swarm.errors import LinkError

    addresses = known_seeds(seeds, "--bootstrap")
    waiting("asking the bootstrap nodes")
    listed = list_swarms(addresses)
    for problem in listed["problems"]:
        click.echo(problem, err=True)
    swarm = chosen(name.strip(), listed["swarms"])
    click.echo(described(swarm), err=True)
    if not yes:
        if not sys.stdin.isatty():
            raise LinkError(
                f"Nobody can be asked whether to join {swarm['name']!a} here: pass --yes, or pass "
                "its link."
            )
        click.confirm("Join it?", abort=True, err=True)
    return str(swarm["link"])
