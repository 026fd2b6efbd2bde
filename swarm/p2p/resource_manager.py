"""Which peers are answered: the judge of every stream and every call to the DHT node.

A refused stream is ended before anything of it is read, and counted under its reason:

    denied       the node's user does not want to meet the peer
    uninvited    the swarm is by invitation only, and the peer has shown none
    crowded      too many streams are being served: of all peers, of this one, or of strangers
    rate         the peer opened too many in a minute
    time         what answering the peer or its address range may take of the processor is used up
                 (`shoal.swarm.p2p.processor_time`)
    spent        the bytes that this protocol serves to one peer in an hour are used up
    punch        a request for a direct connection past a relay that may not be fulfilled
                 (`shoal.swarm.p2p.punch`)

The daemon has accepted the connection by then; its connection manager bounds their number.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from shoal.swarm.access.policy import AccessPolicy
from shoal.swarm.p2p.addresses import range_of
from shoal.swarm.wire.messages import GOSSIP_PROTOCOL, SEED_PROTOCOL, SEEN_PROTOCOL

if TYPE_CHECKING:
    from shoal.swarm.p2p.stream import Stream

from shoal.swarm.p2p.counters import Counters
from shoal.swarm.p2p.processor_time import STRANGERS, ProcessorTime
from shoal.swarm.p2p.rate_limit import HOUR_S, RateLimit, TokenBuckets
from shoal.swarm.p2p.stream_places import StreamPlaces
from shoal.swarm.repeats import Repeats

log = logging.getLogger(__name__)

T = TypeVar("T")

ADMISSION_PROTOCOL = "/shoal/admission/1"
FREE = frozenset(
    {
        "/shoal/manifest/1",
        "/shoal/change/1",
        ADMISSION_PROTOCOL,
        GOSSIP_PROTOCOL,
        SEED_PROTOCOL,
        SEEN_PROTOCOL,
    }
)
"""Protocols that need no invitation: without them nobody would know of one, or could show it; and
gossip, to which anybody may listen (`shoal.swarm.gossip.neighbours`).

A second daemon has none.
"""

MAX_HANDLERS = (
    256  # incoming streams served at once: a few for each member of each group that is in flight
)
MAX_HANDLERS_PER_PEER = 16
# more of them, for members that have none yet: a few that hold all they may do not keep the others
# out
MAX_FIRST = 256
MAX_STRANGERS = (
    64  # of those, streams of peers that are no members, so that they cannot keep the members out
)
SAID_AGAIN_S = 600.0
"""After which the log says again that an address range has no time left."""
REASONS = ("denied", "uninvited", "crowded", "rate", "time", "spent", "punch")


@dataclass(frozen=True)
class Rates:
    """Limits in a minute, in one burst or not: streams that one peer may open; calls to the DHT
    node that it may make, and the bytes in them.
    """

    streams: int = 6000
    calls: int = 6000
    call_bytes: int = 64 << 20


class ResourceManager:
    """The judge of every stream that a peer opens, and of every call to the DHT node.

    On the host's loop.

    ``access_policy`` is replaced once the swarm's manifest is known. ``known``: returns whether a
    peer is a member; ``partner``: whether this node has exchanged with it; ``met``: where peers
    were met.
    """

    def __init__(
        self,
        access_policy: AccessPolicy | None = None,
        rates: Rates | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.access_policy = access_policy or AccessPolicy()
        self.known: Callable[[str], bool] = lambda peer: True
        self.partner: Callable[[str], bool] = lambda peer: False
        self.met: Mapping[str, str] = {}
        self.processor_time = ProcessorTime(clock)
        self._counters = Counters()
        rates = rates or Rates()
        self._clock = clock
        self._streams = TokenBuckets(RateLimit(messages=rates.streams, senders=4096), clock)
        self._calls = TokenBuckets(
            RateLimit(messages=rates.calls, nbytes=rates.call_bytes, senders=4096), clock
        )
        self._hourly: dict[str, TokenBuckets] = {}
        self._said = Repeats(clock)
        self._places = StreamPlaces(MAX_HANDLERS, self._end)
        # The same of peers that were no members when they came.
        self._strangers = StreamPlaces(MAX_STRANGERS, self._end)
        self._busy = self._places.peers

    def meter(self, protocol: str, nbytes: int) -> None:
        """Limit ``protocol`` to about ``nbytes`` bytes for one peer in an hour: no stream begins
        once they are spent.

        Answers in progress are not cut off, so up to ``MAX_HANDLERS_PER_PEER`` more may go out.
        """
        self._hourly[protocol] = TokenBuckets(
            RateLimit(messages=1 << 30, nbytes=nbytes, senders=4096, period=HOUR_S), self._clock
        )

    def acquire(self, stream: Stream, protocol: str) -> str:
        """Return why the stream is refused; nothing if it is served, and then `release` must be
        called at its end.
        """
        stream.partner = self.partner(stream.peer_id)
        return self._counted(self._refusal(stream, protocol) or self._placed(stream))

    async def answer(self, stream: Stream, protocol: str, work: Awaitable[T]) -> T:
        """Return what ``work`` returns, which answers a stream, and charge the peer for its time;
        with a protocol that is metered by bytes only the stream itself has cost some.
        """
        if protocol in self._hourly:
            return await work
        return await self._charged(work, stream.peer_id, stream.origin)

    async def answer_call(self, peer: str, work: Awaitable[T]) -> T:
        """The same of a call to the DHT node."""
        return await self._charged(work, peer, self.met.get(peer, ""))

    def renew(self, stream: Stream, protocol: str) -> bool:
        """Return whether a further request on a stream that is served may be answered: it counts as
        one on a new stream.
        """
        return not self._counted(self._refusal(stream, protocol, own=1))

    def release(self, stream: Stream, protocol: str, sent: int) -> None:
        """Note the end of a stream on which ``sent`` bytes went out."""
        self._free(stream)
        if protocol in self._hourly:
            self._hourly[protocol].charge(stream.peer_id, sent)

    def reject(self, reason: str) -> None:
        self._counters.reject(reason)

    def refused(self) -> dict[str, int]:
        """Return reason -> number of streams and calls refused so far, if above 0; for any
        thread.
        """
        return self._counters.rejected()

    def calls(self, peer: str, nbytes: int) -> str:
        """Return why a call of ``nbytes`` bytes to the DHT node is refused, or nothing.

        DHT records need no invitation: each is signed, and `shoal.swarm.membership.directory`
        applies the access policy to it.
        """
        if not self._has_time(peer, self.met.get(peer, "")):
            return self._counted("time")
        if self.access_policy.denies(peer):
            return self._counted("denied")
        if not self._calls.take(peer, 1, nbytes):
            return self._counted("rate")
        return ""

    def _counted(self, reason: str) -> str:
        if reason:
            self._counters.reject(reason)
        return reason

    def _refusal(self, stream: Stream, protocol: str, own: int = 0) -> str:
        peer = stream.peer_id
        if not self._has_time(peer, stream.origin):
            return "time"
        if self.access_policy.denies(peer) or (
            protocol not in FREE and self.access_policy.blocks(peer)
        ):
            return "denied"
        if protocol not in FREE and not self.access_policy.admits(peer):
            return "uninvited"
        if self._busy[peer] - own >= MAX_HANDLERS_PER_PEER:
            return "crowded"
        if not self._streams.take(peer, 1, 0):
            return "rate"
        hourly = self._hourly.get(protocol)
        return "spent" if hourly is not None and not hourly.take(peer, 1, 1) else ""

    def _has_time(self, peer: str, host: str) -> bool:
        is_member = self.known(peer)
        if self.processor_time.take_stream(peer, host, is_member=is_member):
            return True
        place = range_of(host) or "a relay"
        if not is_member and self._said.due(place, SAID_AGAIN_S):
            log.warning(
                "peers from %s that are no members have used up the processor time that answering "
                "them may take (%g s in %g s): more of their streams are refused for now",
                place,
                STRANGERS.of_range_s,
                STRANGERS.period_s,
            )
        return False

    async def _charged(self, work: Awaitable[T], peer: str, host: str) -> T:
        is_member = self.known(peer)
        return await self.processor_time.charged(work, peer, host, is_member=is_member)

    def _placed(self, stream: Stream) -> str:
        """Give the stream a place, and return why not.

        It is judged last, for another may have to give way to it.
        """
        known = self.known(stream.peer_id)
        total = self._busy.total()
        if not known and not self._strangers.take(stream):
            return "crowded"
        has_given_way = self._busy.total() < total  # another stream
        is_first = known and stream.peer_id not in self._busy
        if self._places.take(stream, MAX_FIRST if has_given_way or is_first else 0):
            return ""
        self._strangers.free(stream)
        return "crowded"

    def _free(self, stream: Stream) -> None:
        self._places.free(stream)
        self._strangers.free(stream)

    def _end(self, stream: Stream) -> None:
        self._free(stream)
        self._counters.reject("crowded")
        stream.abort()
