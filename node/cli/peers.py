"""The command ``shoal peers``. Heavy imports happen inside it."""

from __future__ import annotations

import click

from shoal.node.cli.options import json_option, verbose_option, waiting
from shoal.node.exit_codes import ExitCode
from shoal.node.json_output import dumps
from shoal.node.logs import log_to_stderr


@click.command(short_help="Show the reputation and bans of a swarm's peers.")
@click.argument("link")
@json_option
@verbose_option
def peers(link: str, as_json: bool, verbose: bool) -> int:
    """Show the reputation, claims, votes and bans of the peers in the swarm of LINK."""
    from shoal.node.config.links import read_link

    parsed = read_link(link)
    log_to_stderr(verbose)
    from shoal.node.verify.peers import read_peers, summary

    waiting("asking the swarm's peers")
    report = read_peers(parsed)
    click.echo(dumps(report) if as_json else summary(report))
    return int(ExitCode.OK)
