"""The command ``shoal pull``. Heavy imports happen inside it."""

from __future__ import annotations

from pathlib import Path

import click

from shoal.node.cli.options import waiting
from shoal.node.exit_codes import ExitCode
from shoal.node.help import TaskOption
from shoal.node.json_output import dumps
from shoal.node.logs import log_to_stderr


@click.command(short_help="Download a swarm's weights without joining it.")
@click.argument("link")
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="DIR", help="Folder to write into.")
@click.option(
    "--task", "--hooks", "hooks", cls=TaskOption, metavar="MODULE:CLASS|FILE.py:CLASS", help="Your copy of the swarm's task."
)
@click.option("--max-bytes", type=click.IntRange(1), default=64 << 30, show_default=True, help="Most bytes of weights to download.")
@click.option("--force", is_flag=True, help="Replace the weights that are in DIR.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on the last line of stdout.")
@click.option("--verbose", is_flag=True, help="Log what the network does, on stderr.")
def pull(link: str, out: Path, hooks: str | None, max_bytes: int, force: bool, as_json: bool, verbose: bool) -> int:
    """Download the weights of the swarm of LINK, without joining it.

    Writes DIR/model.safetensors, and how to load it. After an interruption it continues where it stopped.
    """
    from shoal.node.config.links import read_link

    parsed = read_link(link)
    log_to_stderr(verbose)
    from shoal.node.commands.pull import pull as take
    from shoal.node.commands.pull import summary

    waiting("asking the swarm's peers for their newest weights")
    report = take(parsed, out, hooks=hooks, max_bytes=max_bytes, force=force)
    click.echo(dumps(report) if as_json else summary(report))
    return int(ExitCode.OK)
