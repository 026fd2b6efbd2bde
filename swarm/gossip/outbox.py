"""Messages of this node on one topic that wait to be published.

    outbox = Outbox[M]()
    outbox.put(message, nbytes)     # from any thread; returns how many were dropped for it
    message = await outbox.get()    # on the host's loop: publish it, then
    outbox.settle()
    outbox.wait_until_settled(5.0)  # for a node that is about to leave

While the daemon restarts they wait here; the oldest of too many are dropped.
"""

from __future__ import annotations

import threading
from typing import Generic

from shoal.swarm.gossip.envelope import BoundedQueue
from shoal.swarm.wire.envelope import M

MAX_MESSAGES = 256
MAX_BYTES = 32 << 20


class Outbox(Generic[M]):
    """Queue of at most `MAX_MESSAGES` messages and `MAX_BYTES`; it also knows which of those taken
    from it are still on their way.
    """

    def __init__(self) -> None:
        self._queue: BoundedQueue[M] = BoundedQueue(MAX_MESSAGES, MAX_BYTES)
        self._changed = threading.Condition()
        """Guards the next one."""
        self._unsettled = 0
        """Messages that were neither published nor given up yet."""

    def put(self, message: M, nbytes: int) -> int:
        """Queue ``message`` without waiting; return how many of the oldest were dropped for it."""
        with self._changed:
            dropped = len(self._queue.put(message, nbytes))
            self._unsettled += 1 - dropped
        return dropped

    async def get(self) -> M:
        """Remove and return the oldest message, as soon as there is one; `settle` follows."""
        return await self._queue.get()

    def settle(self) -> None:
        """Note that a message from `get` was published or given up."""
        with self._changed:
            self._unsettled -= 1
            self._changed.notify_all()

    def wait_until_settled(self, seconds: float) -> bool:
        """Wait until all messages so far were published or given up; return False if ``seconds``
        did not suffice. Not for the host's own thread.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self._unsettled <= 0, seconds)
