"""The options of ``up`` and ``join`` about whom this node meets and what it may use up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click


def limit_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds them to a command."""
    options = [
        click.option("--allow", multiple=True, metavar="ID|FILE", help="Meet these peers only."),
        click.option("--deny", multiple=True, metavar="ID|FILE", help="Do not meet these peers."),
        click.option("--upload", type=float, metavar="MBIT", help="Send at most so many megabits a second.  [default: no limit]"),
        click.option("--ram", type=float, metavar="GB", help="Train only what fits into so much memory.  [default: no limit]"),
        click.option("--disk", type=float, metavar="GB", help="Let the folder hold so many gigabytes.  [default: no limit]"),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def limit_overrides(flags: dict[str, Any]) -> dict[str, Any]:
    """What they say, as dotted settings; those not given are None."""
    return {
        "peers.allow": list(flags["allow"]) or None,
        "peers.deny": list(flags["deny"]) or None,
        "node.upload": flags["upload"],
        "node.ram": flags["ram"],
        "shoal.node.checkpoint.disk_budget": flags["disk"],
        "swarm.invite_only": flags.get("invite_only"),
    }
