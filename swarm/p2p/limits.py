"""Limits on the work that peers cause here: which peers are answered, how often, how many at a
time, and with how many bytes.

A refused stream is ended before anything of it is read, and counted under its reason:

    denied       the node's user does not want to meet the peer
    uninvited    the swarm is by invitation only, and the peer has shown none
    crowded      too many streams are being served: of all peers, of this one, or of those that are
                 no members. Of the first and the last kind the address range with the most gives
                 one up to another range (`StreamPlaces`)
    rate         the peer opened too many streams in a minute, or all peers of its address range
                 together did
    spent        the bytes that this protocol hands out to one peer in an hour are used up
    punch        a request for a direct connection past a relay that may not be fulfilled
                 (`shoal.swarm.p2p.punch`)

The daemon has accepted the connection by then, for it knows no lists; its connection manager bounds
the number of connections.

Keys cost nothing, so a table that is first come belongs to whoever fills it. Here the range with
the most streams gives one up to a range with fewer; and in one range, which may be a home's, or of
all that come by a relay, a stranger gives way to a peer with which this node has exchanged.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from shoal.swarm.access import AccessPolicy
from shoal.swarm.p2p.addresses import range_of
from shoal.swarm.wire.messages import SEED_PROTOCOL, SEEN_PROTOCOL

if TYPE_CHECKING:
    from shoal.swarm.p2p.stream import Stream

MINUTE = 60.0
HOUR = 3600.0
K = TypeVar("K")
V = TypeVar("V")


class Newest(OrderedDict[K, V]):
    """The ``most`` entries that were set last; older ones are forgotten, so that no peer can make
    it grow.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._most,), None, None, iter(self.items())  # a copy has its bound


@dataclass(frozen=True)
class RateLimit:
    """Messages and bytes that one sender may send in ``period`` seconds, in one burst or not; and
    the number of senders.
    """

    messages: int = 1200
    nbytes: int = 64 << 20
    senders: int = 1024
    period: float = MINUTE


@dataclass
class _Account:
    messages: float
    nbytes: float
    since: float


class TokenBuckets:
    """Two token buckets for each of a bounded number of senders. Not for several threads at once.

    A sender whose buckets are full again (it sent nothing for long enough) may be forgotten for a
    new one. While there is none such, new senders are refused: a peer that makes up peer ids can
    keep new senders out but not the present ones, and the total never exceeds ``senders`` times the
    limit.
    """

    def __init__(self, limit: RateLimit, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        # The one that was used longest ago first.
        self._accounts: OrderedDict[str, _Account] = OrderedDict()

    def take(self, sender: str, messages: int, nbytes: int) -> bool:
        """Charge ``sender`` and return True; or return False, charging nothing, if it has not that
        much left.
        """
        account = self._account(sender)
        if account is None:
            return False
        self._accounts.move_to_end(sender)
        if account.messages < messages or account.nbytes < nbytes:
            return False
        account.messages -= messages
        account.nbytes -= nbytes
        return True

    def charge(self, sender: str, nbytes: int) -> None:
        """Charge ``sender`` for bytes that it was given already; its account may become
        overdrawn.
        """
        if (account := self._account(sender)) is not None:
            account.nbytes -= nbytes

    def _account(self, sender: str) -> _Account | None:
        """Return the refilled account of ``sender``, a new one in place of the oldest if need be;
        None if that is not full.
        """
        if sender not in self._accounts:
            if len(self._accounts) >= self._limit.senders:
                unused, oldest = next(iter(self._accounts.items()))
                self._refill(oldest)
                if oldest.messages < self._limit.messages or oldest.nbytes < self._limit.nbytes:
                    return None
                del self._accounts[unused]
            self._accounts[sender] = _Account(
                self._limit.messages, self._limit.nbytes, self._clock()
            )
        self._refill(self._accounts[sender])
        return self._accounts[sender]

    def _refill(self, account: _Account) -> None:
        now = self._clock()
        share = max(now - account.since, 0.0) / self._limit.period
        account.messages = min(
            account.messages + share * self._limit.messages, self._limit.messages
        )
        account.nbytes = min(account.nbytes + share * self._limit.nbytes, self._limit.nbytes)
        account.since = now


class Counters:
    """Counts of events and, by reason, of rejections. One thread adds to them, others read them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: Counter[str] = Counter()
        self._rejected: Counter[str] = Counter()

    def add(self, event: str, count: int = 1) -> None:
        with self._lock:
            self._events[event] += count

    def reject(self, reason: str, count: int = 1) -> None:
        with self._lock:
            self._rejected[reason] += count

    def events(self) -> dict[str, int]:
        with self._lock:
            return dict(self._events)

    def rejected(self) -> dict[str, int]:
        with self._lock:
            return dict(self._rejected)


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


ADMISSION_PROTOCOL = "/shoal/admission/1"
FREE = frozenset(
    {
        "/shoal/manifest/1",
        "/shoal/change/1",
        ADMISSION_PROTOCOL,
        SEED_PROTOCOL,
        SEEN_PROTOCOL,
    }
)
"""Protocols that need no invitation: without them nobody would know of one, or could show it.

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
REASONS = ("denied", "uninvited", "crowded", "rate", "spent", "punch")


@dataclass(frozen=True)
class Rates:
    """Limits in a minute, in one burst or not: streams that one peer may open, and all peers of its
    address range together; calls to the DHT node that one peer may make, and the bytes in them.
    """

    streams: int = 6000
    streams_of_range: int = 60_000
    calls: int = 6000
    call_bytes: int = 64 << 20


class ResourceManager:
    """The judge of every stream that a peer opens, and of every call to the DHT node.

    On the host's loop.

    ``access_policy`` is replaced once the swarm's manifest is known. ``known``: returns whether a
    peer is a member; ``partner``: whether this node has exchanged with it.
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
        self._counters = Counters()
        rates = rates or Rates()
        self._clock = clock
        self._streams = TokenBuckets(RateLimit(messages=rates.streams, senders=4096), clock)
        self._ranges = TokenBuckets(RateLimit(messages=rates.streams_of_range, senders=4096), clock)
        self._calls = TokenBuckets(
            RateLimit(messages=rates.calls, nbytes=rates.call_bytes, senders=4096), clock
        )
        self._hourly: dict[str, TokenBuckets] = {}
        self._places = StreamPlaces(MAX_HANDLERS, self._end)
        self._strangers = StreamPlaces(
            MAX_STRANGERS, self._end
        )  # the same of peers that were no members when they came
        self._busy = self._places.peers

    def meter(self, protocol: str, nbytes: int) -> None:
        """Limit ``protocol`` to about ``nbytes`` bytes for one peer in an hour: no stream begins
        once they are spent.

        Answers in progress are not cut off, so up to ``MAX_HANDLERS_PER_PEER`` more may go out.
        """
        self._hourly[protocol] = TokenBuckets(
            RateLimit(messages=1 << 30, nbytes=nbytes, senders=4096, period=HOUR), self._clock
        )

    def acquire(self, stream: Stream, protocol: str) -> str:
        """Return why the stream is refused; nothing if it is served, and then `release` must be
        called at its end.
        """
        stream.partner = self.partner(stream.peer_id)
        return self._counted(self._refusal(stream, protocol) or self._placed(stream))

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
        return self._counted(
            "denied"
            if self.access_policy.denies(peer)
            else ""
            if self._calls.take(peer, 1, nbytes)
            else "rate"
        )

    def _counted(self, reason: str) -> str:
        if reason:
            self._counters.reject(reason)
        return reason

    def _refusal(self, stream: Stream, protocol: str, own: int = 0) -> str:
        peer = stream.peer_id
        if self.access_policy.denies(peer) or (
            protocol not in FREE and self.access_policy.blocks(peer)
        ):
            return "denied"
        if protocol not in FREE and not self.access_policy.admits(peer):
            return "uninvited"
        if self._busy[peer] - own >= MAX_HANDLERS_PER_PEER:
            return "crowded"
        if not self._streams.take(peer, 1, 0) or not self._ranges.take(
            range_of(stream.origin), 1, 0
        ):
            return "rate"
        hourly = self._hourly.get(protocol)
        return "spent" if hourly is not None and not hourly.take(peer, 1, 1) else ""

    def _placed(self, stream: Stream) -> str:
        """Give the stream a place, and return why not.

        It is judged last, for another may have to give way to it.
        """
        known = self.known(stream.peer_id)
        total = self._busy.total()
        if not known and not self._strangers.take(stream):
            return "crowded"
        further = self._busy.total() < total or (
            known and stream.peer_id not in self._busy
        )  # another has given way, or the first
        if self._places.take(stream, MAX_FIRST if further else 0):
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
