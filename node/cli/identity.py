"""The commands ``shoal id``. Heavy imports happen inside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from shoal.node.exit_codes import ExitCode
from shoal.node.json_output import dumps

_path_option = click.option("--identity", "path", type=click.Path(path_type=Path), help="Key file.")
_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.group("id", short_help="Show or make the key of this node.")
def identity() -> None:
    """Show or make the key of this node, which is its name on the network."""


@identity.command("show")
@_path_option
@_json_option
def id_show(path: Path | None, as_json: bool) -> int:
    """Print the peer id and the path of its key."""
    from shoal.swarm.identity import Identity

    return _print_identity(Identity.load(path or _default_identity()), as_json)


@identity.command("new")
@_path_option
@_json_option
def id_new(path: Path | None, as_json: bool) -> int:
    """Make a new key; an existing one is never overwritten."""
    from shoal.swarm.identity import Identity

    return _print_identity(Identity.create(path or _default_identity()), as_json)


def _default_identity() -> Path:
    from shoal.node.config.settings import default_identity_path

    return default_identity_path()


def _print_identity(found: Any, as_json: bool) -> int:
    if as_json:
        click.echo(dumps({"peer": found.peer_id, "path": str(found.path)}))
    else:
        click.echo(f"{found.peer_id}\n{found.path}")
    return int(ExitCode.OK)
