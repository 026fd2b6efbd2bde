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
"""Seconds between draws of the newcomers that get a place, when `Room` cannot keep all."""


class MemberTable:
    """Records by peer id. For any thread.

    ``room`` bounds how many are kept, and chooses which. ``ttl``: seconds for which a record
    counts; ``now`` returns Unix seconds by the others' clock.
    """

    def __init__(self, room: Room, *, ttl: float, now: Callable[[], float]) -> None:
        self.ttl = ttl
        self._room = room
        self._now = now
        # Guards the records. `knows` and `peers` read without it: so the dict is replaced whole.
        self._changed = threading.Condition()
        self._records: dict[str, Member] = {}

    def take(self, found: Collection[Member]) -> None:
        """Add records read from the directory; keep those within ``ttl`` that `Room` chooses."""
        oldest = self._now() - self.ttl
        with self._changed:
            kept = {}
            for peer, member in self._records.items():
                if member.issued >= oldest:
                    kept[peer] = member
            for member in found:
                _keep_newest(kept, member)
            # By this node's own clock: each node draws by itself.
            draw = int(time.time() / NEWCOMER_DRAW_S)
            self._records = self._room.choose(kept, draw)
            self._changed.notify_all()

    def hear(self, member: Member) -> None:
        """Add a record that its peer sent itself. `take` bounds the number. Wakes nobody."""
        with self._changed:
            _keep_newest(self._records, member)

    def live(self) -> dict[str, Member]:
        """Return the records that are not older than ``ttl``, of peers that have left too."""
        oldest = self._now() - self.ttl
        with self._changed:
            records = list(self._records.items())
        return {peer: member for peer, member in records if member.issued >= oldest}

    def knows(self, peer: str) -> bool:
        """Return whether a record of ``peer`` is held, perhaps one past ``ttl``. Takes no lock."""
        return peer in self._records

    def peers(self) -> list[str]:
        """Return the peers of which a record is held, perhaps one past ``ttl``."""
        return list(self._records)

    def notify(self) -> None:
        """Wake those who `wait`."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait for `take` or `notify`, ``seconds`` at most; the caller looks again either way."""
        with self._changed:
            self._changed.wait(seconds)


def _keep_newest(records: dict[str, Member], member: Member) -> None:
    """Put ``member`` in place of an earlier record of the same peer."""
    before = records.get(member.peer)
    if before is None or member.issued > before.issued:
        records[member.peer] = member
