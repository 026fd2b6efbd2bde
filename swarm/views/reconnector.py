"""Dialling lost peers again, so that the halves of a partitioned swarm find each other when the network is whole.

Nothing else does: each half keeps its own directory, and a node that has a neighbour looks no further. So every `PERIOD` seconds a
node dials some of the peers that it knows but has not in view, each again after twice the time, up to `LONGEST`. (libp2p itself
refuses to dial an address again for up to five minutes after many failures.) Peers that left on purpose are not dialled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence

from shoal.swarm.errors import NetworkError

log = logging.getLogger(__name__)

PERIOD = 10.0  # seconds between two attempts
TRIED = 4  # peers dialled in one attempt
FIRST, LONGEST = 10.0, 300.0  # seconds until a peer is dialled again


class Reconnector:
    """Schedule of the peers to dial again.

    ``known``: full multiaddrs of known peers; ``here``: the peers in view; ``left``: those that left lately; ``meet``: dials
    addresses, and makes the peers that answer known to the DHT.
    """

    def __init__(
        self,
        known: Callable[[], Sequence[str]],
        here: Callable[[], Collection[str]],
        left: Callable[[], Collection[str]],
        meet: Callable[[Sequence[str]], Awaitable[None]],
    ) -> None:
        self._known, self._here, self._left, self._meet = known, here, left, meet
        self._due: dict[str, tuple[float, float]] = {}
        """For each peer the time of its next dial, and the pause after that."""
        self._gone: set[str] = set()

    def due(self, now: float) -> list[str]:
        """Return the addresses to dial at ``now``, which count as dialled."""
        where: dict[str, list[str]] = {}
        for address in self._known():
            where.setdefault(address.rpartition("/p2p/")[2], []).append(address)
        here = set(self._here())
        self._gone = ((self._gone | set(self._left())) - here) & where.keys()
        missing = where.keys() - here - self._gone
        # A peer that has just vanished may be restarting, so the first dial waits too.
        self._due = {peer: self._due.get(peer, (now + FIRST, FIRST)) for peer in missing}
        next_peers = sorted((when, peer) for peer, (when, _) in self._due.items() if when <= now)[:TRIED]
        for _, peer in next_peers:
            pause = min(2 * self._due[peer][1], LONGEST)
            self._due[peer] = now + pause, pause
        return [address for _, peer in next_peers for address in where[peer]]

    async def run(self) -> None:
        """Dial from time to time until cancelled. On the host's loop."""
        while True:
            await asyncio.sleep(PERIOD)
            try:
                if addresses := self.due(asyncio.get_running_loop().time()):
                    await self._meet(addresses)
            except NetworkError as error:
                log.debug("no lost peer was dialled: %s", error)
            except Exception:  # a bug must not keep the swarm apart
                log.warning("dialling lost peers failed; trying again", exc_info=True)
