"""A bounded number of streams, shared out so that no address range keeps the others out.

Keys cost nothing, so a table that is first come belongs to whoever fills it. Here the range with
the most streams gives one up to a range with fewer; and in one range, which may be a home's, or of
all that come by a relay, a stranger gives way to a peer with which this node has exchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.swarm.p2p.addresses import range_of

if TYPE_CHECKING:
    from shoal.swarm.p2p.stream import Stream


class StreamPlaces:
    """At most ``most`` streams.

    ``ends``: called with one that has to give way, instead of ending it.
    """

    def __init__(self, most: int, ends: Callable[[Stream], None] | None = None) -> None:
        self._most = most
        self._ends = ends
        self._streams: dict[Stream, None] = {}  # the oldest first
        self.peers: Counter[str] = Counter()  # the streams of each peer

    def take(self, stream: Stream, beyond: int = 0) -> bool:
        """Give ``stream`` a place, one of ``beyond`` further ones if need be; return False if none
        is left for it.
        """
        if len(self._streams) >= self._most + beyond:
            last = self._last(stream)
            if last is None:
                return False
            self.free(last)
            (self._ends or type(last).abort)(last)
        self._streams[stream] = None
        self.peers[stream.peer_id] += 1
        return True

    def free(self, stream: Stream) -> None:
        """Give back the place of ``stream``, if it has one."""
        if stream in self._streams:
            del self._streams[stream]
            self.peers[stream.peer_id] -= 1
            if not self.peers[stream.peer_id]:
                del self.peers[stream.peer_id]

    def _last(self, stream: Stream) -> Stream | None:
        """Return the stream that gives way: of the crowded range a stranger's, the oldest of the
        peer that has most.
        """
        ranges = Counter(range_of(other.origin) for other in self._streams)
        own = range_of(stream.origin)
        crowded, taken = ranges.most_common(1)[0]
        if taken <= ranges[own] + 1:
            crowded = own
        there = [other for other in self._streams if range_of(other.origin) == crowded]
        if crowded == own:
            there = [other for other in there if stream.partner and not other.partner]
        return min(
            there, key=lambda other: (other.partner, -self.peers[other.peer_id]), default=None
        )
