"""The members that a node sees: the newest record of each peer, of those that left too.

table = MemberTable(room, ttl=30.0, now=time.time)
table.take(records)
table.live()
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from shoal.swarm.membership.room import Room
from shoal.swarm.wire.messages import Member

NEWCOMER_DRAW_S = 60.0
"""After which other newcomers get a place, if there is no room for all."""


class MemberTable:
    """Records by peer id. For any thread.

    ``room`` chooses which are kept. ``ttl``: seconds for which a record counts; ``now`` returns
    Unix seconds by the others' clock.
    """

    def __init__(self, room: Room, *, ttl: float, now: Callable[[], float]) -> None:
        self.ttl = ttl
        self._room = room
        self._now = now
        self._changed = threading.Condition()  # guards the next one
        self._records: dict[str, Member] = {}

    def take(self, found: Collection[Member]) -> None:
        """Take records that were read."""
        oldest = self._now() - self.ttl
        with self._changed:
            kept = {}
            for peer, member in self._records.items():
                if member.issued >= oldest:
                    kept[peer] = member
            for member in found:
                _keep_newest(kept, member)
            self._records = self._room.choose(kept, int(time.time() / NEWCOMER_DRAW_S))
            self._changed.notify_all()

    def hear(self, member: Member) -> None:
        """Take a record from its author's own hand."""
        with self._changed:
            _keep_newest(self._records, member)

    def live(self) -> dict[str, Member]:
        """Return the records that are not older than ``ttl``."""
        oldest = self._now() - self.ttl
        with self._changed:
            records = list(self._records.items())
        return {peer: member for peer, member in records if member.issued >= oldest}

    def knows(self, peer: str) -> bool:
        """Return whether a record of ``peer`` was read lately. Quick."""
        return peer in self._records

    def peers(self) -> list[str]:
        """Return the peers of which a record was read lately."""
        return list(self._records)

    def notify(self) -> None:
        """Wake those who `wait`."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait until records were taken, at most so long."""
        with self._changed:
            self._changed.wait(seconds)


def _keep_newest(records: dict[str, Member], member: Member) -> None:
    """Put ``member`` in place of an earlier record of the same peer."""
    before = records.get(member.peer)
    if before is None or member.issued > before.issued:
        records[member.peer] = member
