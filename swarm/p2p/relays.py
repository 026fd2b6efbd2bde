"""Which of the bootstrap peers to take as relays: those that answer at an address of their own, two at most.

libp2p begins to ask the relays it was given for a place only once all of them were reached, or after three minutes. So a dead
one, or one that is behind a relay itself, must not be among them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from shoal.swarm.p2p.daemon_process import is_loopback

log = logging.getLogger(__name__)

MAX_RELAYS = 2
PROBE_S = 2.0


def candidates(bootstrap: Sequence[str]) -> list[str]:
    """One address of each peer that may be reached directly, in the order given."""
    relayed = {address.rpartition("/p2p/")[2] for address in bootstrap if "/p2p-circuit/" in address}
    found: dict[str, str] = {}
    for address in bootstrap:
        peer = address.rpartition("/p2p/")[2]
        if peer not in relayed and address.split("/")[3:4] == ["tcp"] and not is_loopback(address):
            found.setdefault(peer, address)
    return list(found.values())


async def answering(bootstrap: Sequence[str]) -> list[str]:
    """Those of `candidates` at which something takes a TCP connection, the first `MAX_RELAYS`. Takes 2 seconds at most."""

    async def answers(address: str) -> bool:
        _, _, host, _, port, *_ = address.split("/")
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), PROBE_S)
        except (OSError, ValueError, asyncio.TimeoutError) as error:
            log.debug("no relay at %s: %r", address, error)
            return False
        writer.close()
        return True

    found = candidates(bootstrap)
    alive = await asyncio.gather(*map(answers, found))
    return [address for address, well in zip(found, alive, strict=True) if well][:MAX_RELAYS]
