"""``shoal seed``: run a bootstrap and relay node, without torch."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path

import click

from shoal.node.config.settings import default_identity_path
from shoal.node.json_output import dumps
from shoal.swarm.access.link import address_problem
from shoal.swarm.identity import Identity
from shoal.swarm.seed.server import Seed

LISTEN = ("/ip4/0.0.0.0/tcp/4001",)


def run_seed(
    identity: Path | None, *, listen: Sequence[str] = (), announce: Sequence[str] = (), relay: bool = False, as_json: bool = False
) -> None:
    """Print the addresses, one a line, and serve until SIGINT or SIGTERM. Raises StartupError, IdentityError or InUseError."""
    key = Identity.load_or_create(identity or default_identity_path().with_name("seed.key"))
    printed: set[tuple[str, ...]] = set()

    def ready(addresses: tuple[str, ...]) -> None:
        usable = tuple(address for address in addresses if address_problem(address) is None)
        if usable not in printed:  # a restarted daemon has the same ones
            printed.add(usable)
            shown = dumps({"peer": key.peer_id, "addresses": usable, "relay": relay}) if as_json else "\n".join(usable)
            click.echo(shown)

    with key.lock():
        asyncio.run(_until_stopped(Seed(key, listen=listen or LISTEN, announce=announce, relay=relay, on_ready=ready)))


async def _until_stopped(seed: Seed) -> None:
    loop = asyncio.get_running_loop()
    running = loop.create_task(seed.run())
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, running.cancel)
    try:
        await running
    except asyncio.CancelledError:
        return
