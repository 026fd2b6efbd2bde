"""Redialling of lost peers: those that the host knows and the directory has not in view.

Of a swarm partitioned without a bootstrap node each half keeps its own directory, and a node that
has a neighbour looks no further. So every `REDIAL_S` seconds a node dials some of the peers that it
lost, each again after twice the time. (libp2p itself refuses to dial an address again for up to
five minutes after many failures.) Peers that left on purpose are not dialled.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from shoal.swarm.errors import NetworkError
from shoal.swarm.p2p.addresses import by_peer

if TYPE_CHECKING:
    from shoal.swarm.membership.directory import Directory
    from shoal.swarm.p2p.host import Host


log = logging.getLogger(__name__)

REDIAL_S = 10.0  # between two attempts
DIALS_AT_ONCE = 4  # peers dialled in one attempt
# seconds until a peer is dialled again
FIRST_PAUSE_S = 10.0
MAX_PAUSE_S = 300.0


class Reconnector:
    """Schedule of the peers to dial again: those that the host knows and the directory has not in
    view.
    """

    def __init__(self, host: Host, directory: Directory) -> None:
        self._host = host
        self._directory = directory
        # For each peer the time of its next dial, and the pause after that.
        self._due: dict[str, tuple[float, float]] = {}
        self._gone: set[str] = set()

    def due(self, now: float) -> list[str]:
        """Return the addresses to dial at ``now``, which count as dialled."""
        where = by_peer(self._host.known())
        here = self._directory.everyone().keys()
        self._gone = ((self._gone | self._directory.departed().keys()) - here) & where.keys()
        missing = where.keys() - here - self._gone
        # A peer that has just vanished may be restarting, so the first dial waits too.
        self._due = {
            peer: self._due.get(peer, (now + FIRST_PAUSE_S, FIRST_PAUSE_S)) for peer in missing
        }
        due = sorted((when, peer) for peer, (when, _) in self._due.items() if when <= now)
        addresses = []
        for _, peer in due[:DIALS_AT_ONCE]:
            pause = min(2 * self._due[peer][1], MAX_PAUSE_S)
            self._due[peer] = now + pause, pause
            addresses += where[peer]
        return addresses

    async def run(self) -> None:
        """Dial from time to time until cancelled. On the host's loop."""
        while True:
            await asyncio.sleep(REDIAL_S)
            try:
                if addresses := self.due(asyncio.get_running_loop().time()):
                    await self._host.meet(addresses)
            except NetworkError as error:
                log.debug("no lost peer was dialled: %s", error)
            except Exception as error:  # a bug must not keep the swarm apart
                self._host.internal_errors.caught("directory", error)
