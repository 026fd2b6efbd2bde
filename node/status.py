"""``shoal status``: look into a swarm without being a member."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from node.display import clean
from swarm.admission import Introductions
from swarm.directory import Directory
from swarm.door import Door
from swarm.host import Host
from swarm.identity import Identity
from swarm.invitation import admission
from swarm.link import Link
from swarm.manifest import Manifest
from swarm.messages import Member
from swarm.overview import overview
from swarm.records import MemberValidator
from swarm.stream import short
from swarm.welcome import fetch_manifest

COLUMNS = ("name", "peer", "state", "round", "step", "loss", "s/step", "exchange", "wait", "failed", "shard", "reach", "seen")
NUMBERS = ("round", "step", "loss", "s/step", "exchange", "wait")


@contextlib.contextmanager
def visited(link: Link) -> Iterator[tuple[Host, Manifest, dict[str, Member]]]:
    """A look into the swarm of ``link``: a host that is no member, the manifest, the members. StartupError and others.

    Of a swarm by invitation only an invitation in the link lets it fetch, too, from who does not know its holder as another peer.
    """
    identity = Identity.ephemeral()
    host = Host.start(
        identity, bootstrap=link.bootstrap, validator=MemberValidator(link.swarm), light=True, swarm=link.swarm
    )
    try:
        _, manifest = fetch_manifest(host, link)
        door = Door(identity.peer_id)
        if manifest.invite_only:
            ticket = admission(link.invite, identity) if link.invite else b""
            door = Door(identity.peer_id, swarm=link.swarm, creator=manifest.creator, ticket=ticket)
            host.introduce = Introductions(host, door).before
        directory = Directory(host, identity, link.swarm, door=door)
        try:
            directory.refresh(15.0)
            yield host, manifest, directory.members()
        finally:
            directory.close()
    finally:
        host.close()


def read_status(link: Link) -> dict[str, Any]:
    """Who is in the swarm of ``link``. StartupError, NetworkError or MessageError."""
    with visited(link) as (_, manifest, members):
        pass
    return overview(link.swarm, manifest, members, time.time())


def table(report: dict[str, Any]) -> str:
    """The report for people: a table, and below it what is wrong, in sentences."""
    grid = Table(title=Text(f"{report['name']}: {report['task']} with {report['method']}, {report['peers']} peers"))
    for column in COLUMNS:
        grid.add_column(column, justify="right" if column in NUMBERS else "left")
    for member in report["members"]:
        loss = "-" if member["loss"] is None else f"{member['loss']:.4f}"
        cells = [
            member["name"],
            short(member["peer"]),
            member["state"],
            str(member["round"]),
            str(member["step"]),
            loss,
            _seconds(member["step_s"]),
            _seconds(member["exchange_s"]),
            _seconds(member["wait_s"]),
            _failed(member),
            member["shard"],
            member["reach"],
            f"{member['seen_s_ago']:.0f} s",
        ]
        grid.add_row(*[Text(cell) for cell in cells])  # Text: a stranger's name is no markup
    console = Console(width=150)
    with console.capture() as capture:
        console.print(grid)
    # One line each, however wide the terminal: sentences may be copied.
    return "\n".join([capture.get().rstrip(), *(clean(sentence) for sentence in report["findings"])])


def _seconds(value: float | None) -> str:
    return f"{value:.3g} s" if value else "-"


def _failed(member: dict[str, Any]) -> str:
    """How many exchanges failed of how many, and in which way most of them."""
    failures: dict[str, int] = member["failures"]
    if not member["exchanges"]:
        return "-"
    worst = f" {max(failures, key=lambda kind: failures[kind])}" if failures else ""
    return f"{sum(failures.values())}/{member['exchanges']}{worst}"
