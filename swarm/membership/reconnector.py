"""Tries peers again that are out of sight, so that the halves of a swarm that fell apart find each other when the network is whole.

Nothing else does: each half keeps its own directory, and a node that still has somebody looks no further. So every `PERIOD` seconds
a node dials some of the peers it knows and does not see, each of them again after twice as long, up to `LONGEST`. (libp2p itself
refuses to dial an address again for up to five minutes after many failures.) Whoever said goodbye is left in peace.
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
    """Whom to dial, and when.

    ``known``: full multiaddrs of peers heard of; ``here``: those in view; ``left``: those that said goodbye of late; ``meet``:
    dials some addresses, and makes who answers known to the DHT.
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
        """Peer -> when to dial it next, and the pause after that."""
        self._gone: set[str] = set()

    def whom(self, now: float) -> list[str]:
        """The addresses to dial at ``now``; counts as having dialled them."""
        where: dict[str, list[str]] = {}
        for address in self._known():
            where.setdefault(address.rpartition("/p2p/")[2], []).append(address)
        here = set(self._here())
        self._gone = ((self._gone | set(self._left())) - here) & where.keys()
        missing = where.keys() - here - self._gone
        # Who has just gone out of sight may have been restarting: the first dial is not at once either.
        self._due = {peer: self._due.get(peer, (now + FIRST, FIRST)) for peer in missing}
        due = sorted((when, peer) for peer, (when, _) in self._due.items() if when <= now)[:TRIED]
        for _, peer in due:
            pause = min(2 * self._due[peer][1], LONGEST)
            self._due[peer] = now + pause, pause
        return [address for _, peer in due for address in where[peer]]

    async def run(self) -> None:
        """Dial from time to time, for good. On the host's loop."""
        while True:
            await asyncio.sleep(PERIOD)
            try:
                if addresses := self.whom(asyncio.get_running_loop().time()):
                    await self._meet(addresses)
            except NetworkError as error:
                log.debug("nobody was looked for: %s", error)
            except Exception:  # a bug must not keep the swarm apart
                log.warning("looking for lost peers failed; trying again", exc_info=True)
