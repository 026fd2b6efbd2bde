"""The command ``shoal link``. Heavy imports happen inside it."""

from __future__ import annotations

from pathlib import Path

import click

from shoal.node.cli.options import json_option
from shoal.node.exit_codes import ExitCode
from shoal.node.json_output import dumps


@click.command(short_help="Print a link to the swarm of a node here.")
@click.option("--folder", type=click.Path(path_type=Path), metavar="DIR", help="The node's folder.  [default: the newest in runs/]")
@json_option
def link(folder: Path | None, as_json: bool) -> int:
    """Print a link by which others join the swarm of a node on this machine.

    Every member can do so. The link has the addresses of the node and of other members, so it works though the creator is gone.
    """
    from shoal.node.commands.link import current_link

    found = current_link(folder)
    for note in found["notes"]:
        click.echo(note, err=True)
    click.echo(dumps(found) if as_json else found["link"])
    return int(ExitCode.OK)
