"""What a node lets other peers make it do: whom it answers at all, and how often, at the same time, and with how many bytes.

A stream that is refused is ended before anything of it is read, and counted under its reason:

    denied       the node's user does not want to meet the peer
    uninvited    the swarm is by invitation only, and the peer has shown none
    crowded      too many streams are being served: of all peers, of this one, or of those who are no members
    rate         the peer opened too many streams in a minute, or all together did
    spent        what one peer is handed out of this protocol in an hour is used up

The daemon has accepted the connection by then, for it knows no lists; its connection manager bounds what it
holds open.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from shoal.swarm.access.policy import AccessPolicy
from shoal.swarm.p2p.rate_limit import HOUR, Counters, RateLimit, TokenBuckets
from shoal.swarm.wire.seed import SEED_PROTOCOL

ADMISSION_PROTOCOL = "/shoal/admission/1"
FREE = frozenset({"/shoal/manifest/1", ADMISSION_PROTOCOL, SEED_PROTOCOL})
"""Protocols that need no invitation: without them nobody would know that one is needed, or could show it."""

MAX_HANDLERS = 256  # incoming streams served at once: a few for each member of each group that is in flight
MAX_HANDLERS_PER_PEER = 16
MAX_STRANGERS = 64  # of those, streams of peers that are no members: they cannot keep the members out
REASONS = ("denied", "uninvited", "crowded", "rate", "spent")


@dataclass(frozen=True)
class Rates:
    """What peers may ask for in a minute, all at once if they like."""

    streams: int = 6000
    """Streams that one peer may open."""
    streams_of_all: int = 60_000
    calls: int = 6000
    """Calls to the DHT node that one peer may make."""
    call_bytes: int = 64 << 20
    """Bytes in those calls."""


class ResourceManager:
    """Asked about every stream that a peer opens, and every call to the DHT node. On the host's loop; ``tally`` for any thread.

    ``door``: whom this node meets; it is changed once the swarm's manifest is known. ``known``: whether a peer is a member.
    """

    def __init__(
        self, access_policy: AccessPolicy | None = None, rates: Rates | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.access_policy = access_policy or AccessPolicy()
        self.known: Callable[[str], bool] = lambda peer: True
        self.tally = Counters()
        rates = rates or Rates()
        self._clock = clock
        self._streams = TokenBuckets(RateLimit(messages=rates.streams, senders=4096), clock)
        self._all = TokenBuckets(RateLimit(messages=rates.streams_of_all, senders=1), clock)
        self._calls = TokenBuckets(RateLimit(messages=rates.calls, nbytes=rates.call_bytes, senders=4096), clock)
        self._meters: dict[str, TokenBuckets] = {}
        self._busy: Counter[str] = Counter()  # peer id -> its streams that are being served
        self._strangers: Counter[str] = Counter()  # the same of peers that were no members when they came

    def meter(self, protocol: str, nbytes: int) -> None:
        """From now on ``protocol`` hands out about ``nbytes`` bytes to one peer in an hour: no stream begins once they are spent.

        What is under way is not cut off, so up to ``MAX_HANDLERS_PER_PEER`` answers more may go out.
        """
        self._meters[protocol] = TokenBuckets(RateLimit(messages=1 << 30, nbytes=nbytes, senders=4096, period=HOUR), self._clock)

    def acquire(self, peer: str, protocol: str) -> str:
        """Why the stream is refused; nothing if it is served, and then `closes` must be called at its end."""
        reason = self._refusal(peer, protocol)
        if reason:
            self.tally.reject(reason)
            return reason
        self._busy[peer] += 1
        if peer in self._strangers or not self.known(peer):
            self._strangers[peer] += 1
        return ""

    def release(self, peer: str, protocol: str, sent: int) -> None:
        """The stream is over; ``sent`` bytes went out on it."""
        for counts in (self._busy, self._strangers):
            if peer in counts:
                counts[peer] -= 1
                if counts[peer] <= 0:
                    del counts[peer]
        if protocol in self._meters:
            self._meters[protocol].charge(peer, sent)

    def refused(self) -> dict[str, int]:
        """Reason -> streams and calls that were refused so far, without those that never happened; for any thread."""
        return self.tally.rejected()

    def calls(self, peer: str, nbytes: int) -> str:
        """Why a call of ``nbytes`` bytes to the DHT node is refused, or nothing.

        Records in the DHT need no invitation, for each is signed, and read with the door in mind (`swarm.directory`).
        """
        reason = "denied" if self.access_policy.denies(peer) else "" if self._calls.take(peer, 1, nbytes) else "rate"
        if reason:
            self.tally.reject(reason)
        return reason

    def _refusal(self, peer: str, protocol: str) -> str:
        if self.access_policy.denies(peer) or (protocol not in FREE and self.access_policy.blocks(peer)):
            return "denied"
        if protocol not in FREE and not self.access_policy.admits(peer):
            return "uninvited"
        if self._busy.total() >= MAX_HANDLERS or self._busy[peer] >= MAX_HANDLERS_PER_PEER:
            return "crowded"
        if not self.known(peer) and self._strangers.total() >= MAX_STRANGERS:
            return "crowded"
        if not self._streams.take(peer, 1, 0) or not self._all.take("", 1, 0):
            return "rate"
        meter = self._meters.get(protocol)
        return "spent" if meter is not None and not meter.take(peer, 1, 1) else ""
