"""The commands of a swarm's creator: ``shoal invite``, ``change`` and ``end``.

Heavy imports happen inside them.
"""

from __future__ import annotations

from pathlib import Path

import click

from shoal.node.cli.options import json_option, logging_option, waiting
from shoal.node.console import dumps

creator_option = click.option(
    "--identity",
    "path",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="The creator's key file.  [default: this machine's, or of a node in runs/]",
)


@click.command(short_help="Print an invitation to an invite-only swarm.")
@click.argument("link")
@click.option(
    "--uses",
    type=click.IntRange(1, 65_536),
    default=1,
    show_default=True,
    help="Peers that it admits at a time.",
)
@click.option("--peer", metavar="ID", help="Invite this peer only (`shoal id show` prints its id).")
@click.option(
    "--expires",
    metavar="TIME",
    default="7d",
    show_default=True,
    help="Validity, such as 30m, 12h, 7d or 2w.",
)
@creator_option
@json_option
@logging_option
def invite(
    link: str, uses: int, peer: str | None, expires: str, path: Path | None, as_json: bool
) -> None:
    """Print a link that admits others to the swarm of LINK, which was made with
    `shoal up --invite-only`.

    Only the swarm's creator can do so. Without --peer the link admits anybody who has it: hand it
    over in private.
    """
    from shoal.node.commands.creator import invite as make
    from shoal.node.commands.creator import seconds
    from shoal.node.config.links import read_link
    from shoal.swarm.errors import AdmissionError
    from shoal.swarm.identity import is_peer_id

    parsed = read_link(link)
    if peer is not None and not is_peer_id(peer):
        raise AdmissionError(
            f"--peer {peer[:80]!a} is no peer id: let the newcomer run `shoal id show` and pass "
            "what it prints."
        )
    if peer is not None and uses != 1:
        raise AdmissionError(
            "--peer and --uses do not go together: an invitation for one peer is for one use."
        )
    waiting("asking the swarm's peers")
    made = make(parsed, path, uses=uses, peer=peer, lives=seconds(expires))
    click.echo(dumps(made) if as_json else made["link"])


@click.command(short_help="Change the rate or the steps of a swarm that runs.")
@click.argument("link")
@click.option(
    "--set",
    "assigned",
    multiple=True,
    metavar="KEY=VALUE",
    help="The setting to change: train.lr or train.steps. Several are one change.",
)
@click.option(
    "--at",
    type=click.IntRange(1),
    metavar="ROUND",
    help="Round from which on it counts.  [default: the next]",
)
@creator_option
@json_option
@logging_option
def change(
    link: str, assigned: tuple[str, ...], at: int | None, path: Path | None, as_json: bool
) -> None:
    """Change the learning rate or the number of steps for all members of the swarm of LINK, while
    it runs.

    Only the swarm's creator can do so. Members take the change at the round that it names; those
    that come later, or return, have it from the start. `shoal status` shows it.

    \b
    Examples:
      shoal change 'shoal://...' --set train.lr=1e-4
      shoal change 'shoal://...' --set train.steps=4000 --at 120
    """
    from shoal.node.commands.creator import change as make
    from shoal.node.commands.creator import wanted
    from shoal.node.config.links import read_link
    from shoal.node.config.settings import assignment

    settings = dict(map(assignment, assigned))
    # Before anybody is asked.
    wanted(settings)
    parsed = read_link(link)
    waiting("asking the swarm's peers")
    made = make(parsed, settings, path, at)
    click.echo(dumps(made) if as_json else made["said"])


@click.command(short_help="End the run of a swarm for all members.")
@click.argument("link")
@click.option(
    "--at",
    type=click.IntRange(1),
    metavar="ROUND",
    help="Round in which it ends.  [default: the next]",
)
@creator_option
@json_option
@logging_option
def end(link: str, at: int | None, path: Path | None, as_json: bool) -> None:
    """End the run of the swarm of LINK for all members, in a round that is near.

    Only the swarm's creator can do so. It changes the steps of all members to those of that round,
    as `shoal change` does. They then average once more and end with one model, unless outer.finish
    is none.

    \b
    Examples:
      shoal end 'shoal://...'
      shoal end 'shoal://...' --at 120
    """
    from shoal.node.commands.creator import end as make
    from shoal.node.config.links import read_link

    parsed = read_link(link)
    waiting("asking the swarm's peers")
    made = make(parsed, path, at)
    click.echo(dumps(made) if as_json else made["said"])
