"""A host that says again what it is told."""

import contextlib

from shoal.swarm.identity import Identity
from shoal.swarm.p2p.host import Host

ECHO = "/test/echo/1"


def start(**options):
    return Host.start(Identity.ephemeral(), **{"timeout": 60, **options})


async def ask(host, peer_id, data=b"hello", addresses=()):
    """Send ``data`` to a peer that serves `ECHO`; return its answer."""
    with contextlib.closing(
        await host.open(peer_id, ECHO, addresses=addresses, timeout=30)
    ) as stream:
        await stream.send(data, 30)
        return await stream.receive(1 << 20, 30)
