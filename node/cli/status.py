"""The commands that look at a swarm: ``shoal status``, ``peers`` and ``link``.

Heavy imports happen inside them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from shoal.node.cli.options import json_option, logging_option, waiting
from shoal.node.console import dumps


@click.command(short_help="Show the peers of a swarm: round, loss and speed.")
@click.argument("link", required=False)
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Also show what the node of this folder refused, and its link.",
)
@click.option(
    "--mine",
    is_flag=True,
    help="Show what others confirm of the work of the node in --folder.  [default: the newest]",
)
@json_option
@logging_option
def status(link: str | None, folder: Path | None, mine: bool, as_json: bool) -> None:
    """Show the peers in the swarm of LINK: their round, loss and speed, and a link with members
    that are there now.

    With --folder also show what the node of that folder refused, by reason; LINK is optional then.
    With --mine show instead what partners signed for that node, of which it keeps a tally.
    """
    if mine:
        if link is not None:
            raise click.UsageError("--mine is about a node here: leave the LINK out.")
        _show_tally(folder, as_json)
        return
    if link is None and folder is None:
        raise click.UsageError("Missing argument 'LINK', or --folder DIR.")
    from shoal.node.config.links import read_link

    parsed = None if link is None else read_link(link, folder)
    report: dict[str, Any] = {}
    lines: list[str] = []
    if folder is not None:
        report, lines = _of_folder(folder, with_link=parsed is None)
    if parsed is not None:
        from shoal.node.commands.status import read_status, table

        waiting("asking the swarm's peers")
        report = {**read_status(parsed), **report}
        if not as_json:
            lines.insert(0, table(report))
    click.echo(dumps(report) if as_json else "\n".join(lines))


def _show_tally(folder: Path | None, as_json: bool) -> None:
    """Print what partners signed for the node of ``folder``, or of the newest folder."""
    from shoal.node.commands.status import current_link, tally_table
    from shoal.swarm.topics.tally import saved_tally

    if folder is None:
        folder = Path(current_link(None)["folder"])
    tally = saved_tally(folder).report()
    click.echo(dumps(tally) if as_json else tally_table(tally))


def _of_folder(folder: Path, *, with_link: bool) -> tuple[dict[str, Any], list[str]]:
    """Return what the node of ``folder`` refused, and ``with_link`` its link, for JSON and for
    people.
    """
    from shoal.node.commands.status import current_link, link_line, read_refusals, refusals_said
    from shoal.node.config.links import LINK

    refused = read_refusals(folder / "metrics.jsonl")
    report: dict[str, Any] = {"refused": refused}
    lines = [refusals_said(refused)]
    if with_link and (folder / LINK).exists():
        newest = current_link(folder)
        report["link"] = newest["link"]
        report["invite_only"] = newest["invite_only"]
        lines.append(link_line(newest["link"], invite_only=newest["invite_only"]))
    return report, lines


@click.command(short_help="Show the reputation and bans of a swarm's peers.")
@click.argument("link")
@json_option
@logging_option
def peers(link: str, as_json: bool) -> None:
    """Show the reputation, claims, votes and bans of the peers in the swarm of LINK."""
    from shoal.node.config.links import read_link
    from shoal.node.verify.peers import read_peers, summary

    parsed = read_link(link)
    waiting("asking the swarm's peers")
    report = read_peers(parsed)
    click.echo(dumps(report) if as_json else summary(report))


@click.command(short_help="Print a link to the swarm of a node here.")
@click.option("--name", metavar="NAME", help="The node's name: its folder is runs/NAME.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The node's folder.  [default: the newest in runs/]",
)
@json_option
def link(name: str | None, folder: Path | None, as_json: bool) -> None:
    """Print a link by which others join the swarm of a node on this machine.

    Every member can do so, and at any time. The link has the addresses of the bootstrap nodes, of
    this node and of other members that were there lately, so it works though the creator is gone.

    \b
    Examples:
      shoal link
      shoal link --name anna
    """
    from shoal.node.commands.status import current_link, folder_of

    newest = current_link(folder_of(name, folder))
    for note in newest["notes"]:
        click.echo(note, err=True)
    click.echo(dumps(newest) if as_json else newest["link"])
