"""The commands ``shoal id``. Heavy imports happen inside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from shoal.node.cli.options import json_option
from shoal.node.console import dumps

_path_option = click.option("--identity", "path", type=click.Path(path_type=Path), help="Key file.")


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
    from shoal.node.config.node_settings import default_identity_path

    return default_identity_path()


def _print_identity(key: Any, as_json: bool) -> None:
    if as_json:
        click.echo(dumps({"peer": key.peer_id, "path": str(key.path)}))
    else:
        click.echo(f"{key.peer_id}\n{key.path}")
