"""Filter of a watcher: statuses of its swarm, signed by their authors, newer than the last, and not too many.

Other messages are counted under the reason of their refusal.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from shoal.swarm.errors import MessageError
from shoal.swarm.gossip import envelope
from shoal.swarm.p2p.rate_limit import Counters, RateLimit, TokenBuckets
from shoal.swarm.topics.status import Status

QUOTA = RateLimit(messages=300, nbytes=4 << 20, senders=4096)  # a minute for each publisher; nodes send 120 at most
MAX_PEERS = 4096  # peers whose last status is known
OLD_S = 600.0  # most seconds between a status and our clock: clocks differ, but last week's swarm must not be shown


class RecordFilter:
    """Filter of the topic of statuses of ``swarm``. Not for several threads at once."""

    def __init__(self, swarm: str, clock: Callable[[], float] = time.time) -> None:
        self._swarm, self._clock = swarm, clock
        self._quotas = TokenBuckets(QUOTA, clock)
        self._issued: OrderedDict[str, float] = OrderedDict()
        self._room = envelope.room_for(Status)
        self.counters = Counters()

    def open(self, publisher: str, data: bytes) -> Status:
        """Return the status in ``data``. Raises MessageError, whose reason is counted."""
        self.counters.add("received")
        try:
            status = self._open(publisher, data)
        except MessageError as error:
            self.counters.reject(error.reason)
            raise
        self.counters.add("accepted")
        return status

    def _open(self, publisher: str, data: bytes) -> Status:
        if not self._quotas.take(publisher, 1, len(data)):
            raise MessageError("A message was refused: its publisher sent too many, or too large ones.", "quota")
        sent = envelope.open_envelope(data, self._swarm, self._room)
        opened = envelope.open_body(sent.encoding, sent.size, sent.body, Status)
        status = opened.message
        assert isinstance(status, Status)
        if status.swarm != self._swarm:
            raise MessageError("A status of another swarm was refused.", "foreign-swarm")
        if abs(status.issued - self._clock()) > OLD_S:
            raise MessageError("A status was refused: it is ten minutes old, or a clock is wrong.", "old")
        if status.issued <= self._issued.get(status.peer, 0.0):
            raise MessageError("A status was refused: a newer one was there before.", "replayed")
        self._issued[status.peer] = status.issued
        self._issued.move_to_end(status.peer)
        if len(self._issued) > MAX_PEERS:
            self._issued.popitem(last=False)
        return status
