"""Accounts of traffic: token buckets that limit each sender, the upload budget of this node, and counters of events."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

MINUTE, HOUR = 60.0, 3600.0
CHUNK_S = 0.1  # seconds of the upload budget that are sent at once
BURST_S = 0.25  # seconds of it that may be saved up


@dataclass(frozen=True)
class RateLimit:
    """Messages and bytes that one sender may send in ``period`` seconds, in one burst or not; and the number of senders."""

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

    A sender whose buckets are full again (it sent nothing for long enough) may be forgotten for a new one. While there is none
    such, new senders are refused: a peer that makes up peer ids can keep new senders out but not the present ones, and the
    total never exceeds ``senders`` times the limit.
    """

    def __init__(self, limit: RateLimit, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._accounts: OrderedDict[str, _Account] = OrderedDict()  # the one that was used longest ago first

    def take(self, sender: str, messages: int, nbytes: int) -> bool:
        """Charge ``sender`` and return True; or return False, charging nothing, if it has not that much left."""
        now = self._clock()
        account = self._account(sender, now)
        if account is None:
            return False
        self._accounts.move_to_end(sender)
        if account.messages < messages or account.nbytes < nbytes:
            return False
        account.messages -= messages
        account.nbytes -= nbytes
        return True

    def charge(self, sender: str, nbytes: int) -> None:
        """Charge ``sender`` for bytes that it was given already; its account may become overdrawn."""
        account = self._account(sender, self._clock())
        if account is not None:
            account.nbytes -= nbytes

    def _account(self, sender: str, now: float) -> _Account | None:
        account = self._accounts.get(sender)
        if account is None:
            if len(self._accounts) >= self._limit.senders and not self._forget(now):
                return None
            account = self._accounts[sender] = _Account(self._limit.messages, self._limit.nbytes, now)
        self._refill(account, now)
        return account

    def _forget(self, now: float) -> bool:
        sender, oldest = next(iter(self._accounts.items()))
        self._refill(oldest, now)
        if oldest.messages < self._limit.messages or oldest.nbytes < self._limit.nbytes:
            return False
        del self._accounts[sender]
        return True

    def _refill(self, account: _Account, now: float) -> None:
        share = max(now - account.since, 0.0) / self._limit.period
        account.messages = min(account.messages + share * self._limit.messages, self._limit.messages)
        account.nbytes = min(account.nbytes + share * self._limit.nbytes, self._limit.nbytes)
        account.since = now


class BandwidthLimiter:
    """A budget of ``rate`` bytes a second (above 0). Urgent sends may overdraw it; other sends wait until it is positive.

    On one loop only. Over any time t it lets through no more than ``rate`` * t bytes, a quarter of a second's burst, and one chunk
    of each stream that sends, besides urgent sends.
    """

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        if rate <= 0:
            raise ValueError("a rate must be above 0 bytes in a second")
        self._rate, self._clock = rate, clock
        self._left, self._since = rate * BURST_S, clock()
        self._lock: asyncio.Lock | None = None
        self.chunk = max(int(rate * CHUNK_S), 1)
        """Bytes that are sent at once."""

    def spend(self, nbytes: int) -> None:
        """Charge ``nbytes`` bytes that are sent now."""
        self._refill()
        self._left -= nbytes

    async def wait(self) -> None:
        """Wait until the budget is not overdrawn. Callers go on in the order in which they came."""
        if self._lock is None:
            self._lock = asyncio.Lock()
        async with self._lock:
            while (deficit := self.deficit()) > 0:
                await asyncio.sleep(max(deficit / self._rate, 0.001))

    def deficit(self) -> float:
        """Return the bytes by which the budget is overdrawn; 0 or less if it is not."""
        self._refill()
        return -self._left

    def _refill(self) -> None:
        now = self._clock()
        self._left = min(self._left + (now - self._since) * self._rate, self._rate * BURST_S)
        self._since = now


class Counters:
    """Counts of events and, by reason, of rejections. One thread adds to them, others read them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: Counter[str] = Counter()
        self._rejected: Counter[str] = Counter()

    def add(self, event: str, count: int = 1) -> None:
        """Count an event, such as ``sent``."""
        with self._lock:
            self._events[event] += count

    def reject(self, reason: str, count: int = 1) -> None:
        """Count a rejection."""
        with self._lock:
            self._rejected[reason] += count

    def events(self) -> dict[str, int]:
        """Return event -> count."""
        with self._lock:
            return dict(self._events)

    def rejected(self) -> dict[str, int]:
        """Return reason -> number of rejections."""
        with self._lock:
            return dict(self._rejected)
