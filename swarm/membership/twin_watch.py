"""Whether another node runs with this node's key.

Two nodes with one key publish one record in turns. A node keeps the dates of the records that it
has published; one in its name with another date, later than its own start by more than clocks
differ, is of another node. An earlier one may be of a run of its own that has died.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from shoal.swarm.wire.messages import Member

MAX_PUBLISHED = 64  # of this node's records whose dates are kept: all that may live, and more
CLOCKS_APART_S = 3.0  # by which the clocks of two machines may differ


class TwinWatch:
    """What the records in one peer's name say of another node with its key.

    ``began``: when this node began, Unix seconds.
    """

    def __init__(self, peer: str, began: float) -> None:
        self.began = began
        self.seen_at = ""
        """Where another node is that runs with this key; nothing without one."""
        self.earlier = False
        """Whether a record was read that may be of an earlier run."""
        self._peer = peer
        self._published: deque[float] = deque(maxlen=MAX_PUBLISHED)  # dates of own records

    def note_published(self, issued: float) -> None:
        self._published.append(issued)

    def look(self, members: Iterable[Member]) -> None:
        """Note the records of present ``members`` in this node's name that it did not publish."""
        for member in members:
            if member.peer != self._peer or member.issued in self._published:
                continue
            if member.issued > self.began + CLOCKS_APART_S:
                self.seen_at = next(iter(member.addresses), "an unknown address")
            else:
                self.earlier = True
