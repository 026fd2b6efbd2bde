"""The commands ``shoal link`` and ``shoal invite``. Heavy imports happen inside them."""

from __future__ import annotations

from pathlib import Path

import click

from shoal.node.cli.options import json_option
from shoal.node.exit_codes import ExitCode
from shoal.node.json_output import dumps
from shoal.node.logs import log_to_stderr


@click.command(short_help="Print a link to the swarm of a node here.")
@click.option("--name", metavar="NAME", help="The node's name: its folder is runs/NAME.")
@click.option("--folder", type=click.Path(path_type=Path), metavar="DIR", help="The node's folder.  [default: the newest in runs/]")
@json_option
def link(name: str | None, folder: Path | None, as_json: bool) -> int:
    """Print a link by which others join the swarm of a node on this machine.

    Every member can do so, and at any time. The link has the addresses of the bootstrap nodes, of this node and of other members
    that were there lately, so it works though the creator is gone.

    \b
    Examples:
      shoal link
      shoal link --name anna
    """
    from shoal.node.commands.link import current_link, folder_of

    found = current_link(folder_of(name, folder))
    for note in found["notes"]:
        click.echo(note, err=True)
    click.echo(dumps(found) if as_json else found["link"])
    return int(ExitCode.OK)


@click.command(short_help="Print an invitation to an invite-only swarm.")
@click.argument("link")
@click.option("--uses", type=click.IntRange(1, 65_536), default=1, show_default=True, help="Peers that it admits at a time.")
@click.option("--peer", metavar="ID", help="Invite this peer only (`shoal id show` prints its id).")
@click.option("--expires", metavar="TIME", default="7d", show_default=True, help="Validity, such as 30m, 12h, 7d or 2w.")
@click.option("--identity", "path", type=click.Path(path_type=Path), help="The creator's key file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on the last line of stdout.")
@click.option("--verbose", is_flag=True, help="Log what the network does, on stderr.")
def invite(link: str, uses: int, peer: str | None, expires: str, path: Path | None, as_json: bool, verbose: bool) -> int:
    """Print a link that admits others to the swarm of LINK, which was made with `shoal up --invite-only`.

    Only the swarm's creator can do so. Without --peer the link admits anybody who has it: hand it over in private.
    """
    from shoal.node.config.links import read_link
    from shoal.swarm.errors import AdmissionError
    from shoal.swarm.identity import is_peer_id

    parsed = read_link(link)
    log_to_stderr(verbose)
    from shoal.node.commands.invite import invite as make
    from shoal.node.commands.invite import seconds

    if peer is not None and not is_peer_id(peer):
        raise AdmissionError(f"--peer {peer[:80]!a} is no peer id: let the newcomer run `shoal id show` and pass what it prints.")
    if peer is not None and uses != 1:
        raise AdmissionError("--peer and --uses do not go together: an invitation for one peer is for one use.")
    made = make(parsed, path, uses=uses, peer=peer, lives=seconds(expires))
    click.echo(dumps(made) if as_json else made["link"])
    return int(ExitCode.OK)
