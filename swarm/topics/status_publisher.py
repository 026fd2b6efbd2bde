"""The sending of this node's status to watchers of the swarm: after a round, and regularly while one lasts.

Nodes do not read each other's statuses. They take part in the topic only so that their daemons forward others' messages; received
ones are dropped unopened, so their cost does not depend on their content. All nodes together send at most some `PER_SECOND`
statuses a second however many they are, which bounds what each has to forward.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from shoal.swarm.gossip.gossip import Gossip
from shoal.swarm.topics.status import PER_SECOND, Status

log = logging.getLogger(__name__)

GAP_S = 0.5  # seconds between two statuses of a node, at least
BEAT_S = 1.0  # seconds after which a node sends its status again, though no round has ended


class StatusPublisher:
    """A publisher of what ``make`` returns, until `close`.

    ``make`` is called on the host's loop, so it must not wait; ``members`` returns the number of nodes in the swarm, as far as
    known.
    """

    def __init__(self, gossip: Gossip, make: Callable[[], Status | None], members: Callable[[], int]) -> None:
        self._make, self._members = make, members
        self.topic = gossip.join(Status, None)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._running = gossip.host.submit(self._run())

    def hint(self) -> None:
        """Send a status soon, because something happened. For any thread; never waits."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                self._loop.call_soon_threadsafe(self._changed.set)

    def close(self) -> None:
        """Stop sending."""
        self._running.cancel()
        self.topic.close()

    def gaps(self) -> tuple[float, float]:
        """Return the least and the most seconds between two statuses."""
        share = max(self._members(), 1) / PER_SECOND
        return max(GAP_S, share), max(BEAT_S, share)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        while True:
            least, most = self.gaps()
            await asyncio.sleep(least)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), most - least)
            self._changed.clear()
            self._publish()

    def _publish(self) -> None:
        try:
            status = self._make()
            if status is not None:
                self.topic.publish(status)
        except Exception as error:  # else no later one would be sent either, and nobody would know
            log.warning("a status was not sent: %s", error)
