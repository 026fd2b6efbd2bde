"""The command ``shoal status``. Heavy imports happen inside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from shoal.node.cli.options import waiting
from shoal.node.exit_codes import ExitCode
from shoal.node.json_output import dumps
from shoal.node.logs import log_to_stderr


@click.command(short_help="Show the peers of a swarm: round, loss and speed.")
@click.argument("link", required=False)
@click.option(
    "--folder", type=click.Path(path_type=Path), metavar="DIR", help="Also show what the node of this folder refused, and its link."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on the last line of stdout.")
@click.option("--verbose", is_flag=True, help="Log what the network does, on stderr.")
def status(link: str | None, folder: Path | None, as_json: bool, verbose: bool) -> int:
    """Show the peers in the swarm of LINK: their round, loss and speed, and a link with members that are there now.

    With --folder also show what the node of that folder refused, by reason; LINK is optional then.
    """
    from shoal.node.config.links import read_link

    if link is None and folder is None:
        raise click.UsageError("Missing argument 'LINK', or --folder DIR.")
    parsed = None if link is None else read_link(link, folder)
    log_to_stderr(verbose)
    report: dict[str, Any] = {}
    lines = []
    if folder is not None:
        from shoal.node.commands.link import current_link
        from shoal.node.commands.status import link_line
        from shoal.node.config.links import LINK
        from shoal.node.runtime.refusal_log import read_refusals, sentence

        report["refused"] = read_refusals(folder / "metrics.jsonl")
        lines.append(sentence(report["refused"]))
        if parsed is None and (folder / LINK).exists():
            found = current_link(folder)
            report |= {"link": found["link"], "invite_only": found["invite_only"]}
            lines.append(link_line(found["link"], invite_only=found["invite_only"]))
    if parsed is not None:
        from shoal.node.commands.status import read_status, table

        waiting("asking the swarm's peers")
        report = {**read_status(parsed), **report}
        if not as_json:
            lines.insert(0, table(report))
    click.echo(dumps(report) if as_json else "\n".join(lines))
    return int(ExitCode.OK)
