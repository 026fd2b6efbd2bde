"""The command ``shoal seed``, a bootstrap node. Heavy imports happen inside it."""

from __future__ import annotations

from pathlib import Path

import click

from shoal.node.cli.options import logging_option


@click.command(short_help="Help nodes find each other, without training.")
@click.option("--relay", is_flag=True, help="Also relay for nodes that nobody can reach.")
@click.option(
    "--listen",
    multiple=True,
    metavar="MULTIADDR",
    help="Address to listen on.  [default: /ip4/0.0.0.0/tcp/4001]",
)
@click.option(
    "--announce",
    multiple=True,
    metavar="MULTIADDR",
    help="Address to announce, if a port is forwarded.",
)
@click.option(
    "--identity",
    "path",
    type=click.Path(path_type=Path),
    help="Key file.  [default: seed.key beside the node's]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with the addresses.")
@logging_option
def seed(
    relay: bool,
    listen: tuple[str, ...],
    announce: tuple[str, ...],
    path: Path | None,
    as_json: bool,
) -> None:
    """Help the nodes of any swarm to find each other, without training.

    Prints addresses for `shoal up --bootstrap`, and runs until it is stopped. Others must be able
    to reach it.
    """
    from shoal.node.commands.swarms import run_seed

    run_seed(path, listen=listen, announce=announce, relay=relay, as_json=as_json)
