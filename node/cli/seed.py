"""The commands ``shoal seed`` and ``shoal swarms``, and a name in place of a link. Heavy imports happen inside them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

from shoal.node.cli.options import json_option, waiting
from shoal.node.exit_codes import ExitCode
from shoal.node.json_output import dumps
from shoal.node.logs import log_to_stderr

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
"""What a public swarm may be called; anything else is read as a link."""


@click.command(short_help="Help nodes find each other, without training.")
@click.option("--relay", is_flag=True, help="Also relay for nodes that nobody can reach.")
@click.option("--listen", multiple=True, metavar="MULTIADDR", help="Address to listen on.  [default: /ip4/0.0.0.0/tcp/4001]")
@click.option("--announce", multiple=True, metavar="MULTIADDR", help="Address to announce, if a port is forwarded.")
@click.option("--identity", "path", type=click.Path(path_type=Path), help="Key file.  [default: seed.key beside the node's]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with the addresses.")
@click.option("--verbose", is_flag=True, help="Log what the network does, on stderr.")
def seed(relay: bool, listen: tuple[str, ...], announce: tuple[str, ...], path: Path | None, as_json: bool, verbose: bool) -> int:
    """Help the nodes of any swarm to find each other, without training.

    Prints addresses for `shoal up --bootstrap`, and runs until it is stopped. Others must be able to reach it.
    """
    log_to_stderr(verbose)
    from shoal.node.commands.seed import run_seed

    run_seed(path, listen=listen, announce=announce, relay=relay, as_json=as_json)
    return int(ExitCode.OK)


@click.command(short_help="List the public swarms that bootstrap nodes know.")
@click.option(
    "--seed",
    "seeds",
    multiple=True,
    metavar="MULTIADDR",
    help="Bootstrap node to ask.  [default: those of SHOAL_SEEDS, or of a file]",
)
@json_option
@click.option("--verbose", is_flag=True, help="Log what the network does, on stderr.")
def swarms(seeds: tuple[str, ...], as_json: bool, verbose: bool) -> int:
    """List the public swarms that bootstrap nodes know: task, peers, size, bytes a round, and what a node needs.

    \b
    Examples:
      shoal swarms --seed /ip4/203.0.113.9/tcp/4001/p2p/12D3KooW...
      shoal join NAME
    """
    log_to_stderr(verbose)
    from shoal.node.commands.swarms import list_swarms, table
    from shoal.node.config.seeds import known_seeds

    addresses = known_seeds(seeds)
    waiting("asking the bootstrap nodes")
    found = list_swarms(addresses)
    click.echo(dumps(found) if as_json else table(found))
    return int(ExitCode.OK)


def link_for(name: str, seeds: tuple[str, ...], yes: bool) -> str:
    """Return ``name`` if it is no name, else the link of the public swarm of that name, after showing it and asking. ShoalError."""
    if NAME.fullmatch(name.strip()) is None:
        return name
    from shoal.node.commands.swarms import chosen, described, list_swarms
    from shoal.node.config.seeds import known_seeds
    from shoal.swarm.errors import LinkError

    addresses = known_seeds(seeds)
    waiting("asking the bootstrap nodes")
    listed = list_swarms(addresses)
    for problem in listed["problems"]:
        click.echo(problem, err=True)
    found = chosen(name.strip(), listed["swarms"])
    click.echo(described(found), err=True)
    if not yes:
        if not sys.stdin.isatty():
            raise LinkError(f"Nobody can be asked whether to join {found['name']!a} here: pass --yes, or pass its link.")
        click.confirm("Join it?", abort=True, err=True)
    return str(found["link"])
