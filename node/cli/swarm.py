"""The commands ``shoal id``, ``link``, ``invite``, ``seed``, ``swarms``, ``peers`` and ``status``.

Heavy imports happen inside.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import click

from shoal.node.cli.options import json_option, logging_option, waiting
from shoal.node.console import dumps

_path_option = click.option("--identity", "path", type=click.Path(path_type=Path), help="Key file.")


creator_option = click.option(
    "--identity",
    "path",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="The creator's key file.  [default: this machine's, or of a node in runs/]",
)


@click.group("id", short_help="Show or make the key of this node.")
def identity() -> None:
    """Show or make the key of this node, which is its name on the network."""


@identity.command("show")
@_path_option
@json_option
def id_show(path: Path | None, as_json: bool) -> None:
    """Print the peer id and the path of its key."""
    from shoal.swarm.identity import Identity

    _print_identity(Identity.load(path or _default_identity()), as_json)


@identity.command("new")
@_path_option
@json_option
def id_new(path: Path | None, as_json: bool) -> None:
    """Make a new key; an existing one is never overwritten."""
    from shoal.swarm.identity import Identity

    _print_identity(Identity.create(path or _default_identity()), as_json)


def _default_identity() -> Path:
    from shoal.node.config.settings import default_identity_path

    return default_identity_path()


def _print_identity(key: Any, as_json: bool) -> None:
    if as_json:
        click.echo(dumps({"peer": key.peer_id, "path": str(key.path)}))
    else:
        click.echo(f"{key.peer_id}\n{key.path}")


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
    from shoal.node.config.links import read_link
    from shoal.swarm.errors import AdmissionError
    from shoal.swarm.identity import is_peer_id

    parsed = read_link(link)
    from shoal.node.commands.creator import invite as make
    from shoal.node.commands.creator import seconds

    if peer is not None and not is_peer_id(peer):
        raise AdmissionError(
            f"--peer {peer[:80]!a} is no peer id: let the newcomer run `shoal id show` and pass "
            "what it prints."
        )
    if peer is not None and uses != 1:
        raise AdmissionError(
            "--peer and --uses do not go together: an invitation for one peer is for one use."
        )
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
    wanted(settings)  # before anybody is asked
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


NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
"""What a public swarm may be called; anything else is read as a link."""


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
    """Return ``name`` if it is no name, else the link of the public swarm of that name, after
    showing it and asking. ShoalError.
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


@click.command(short_help="Show the reputation and bans of a swarm's peers.")
@click.argument("link")
@json_option
@logging_option
def peers(link: str, as_json: bool) -> None:
    """Show the reputation, claims, votes and bans of the peers in the swarm of LINK."""
    from shoal.node.config.links import read_link

    parsed = read_link(link)
    from shoal.node.verify.peers import read_peers, summary

    waiting("asking the swarm's peers")
    report = read_peers(parsed)
    click.echo(dumps(report) if as_json else summary(report))


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
