"""Accounts of traffic: token buckets that limit each sender, the upload budget of this node, and counters of events."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

MINUTE, HOUR = 60.0, 3600.0
PIECE_S = 0.1  # seconds of the upload budget that are sent at once
BURST_S = 0.25  # seconds of it that may be saved up


@dataclass(frozen=True)
class RateLimit:
    """What one sender may send in ``period`` seconds, all at once if it likes; and how many senders are kept account of."""

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
    """The accounts of all senders. Not for several threads at once.

    A sender whose account is full again (it sent nothing for long enough) may be forgotten for a new one. As long as there is
    none such, new senders are refused: whoever makes up peer ids can keep strangers out, but not those who are here, and the
    whole never exceeds ``senders`` times the quota.
    """

    def __init__(self, quota: RateLimit, clock: Callable[[], float] = time.monotonic) -> None:
        self._quota = quota
        self._clock = clock
        self._accounts: OrderedDict[str, _Account] = OrderedDict()  # the one that was used longest ago first

    def take(self, sender: str, messages: int, nbytes: int) -> bool:
        """Charge ``sender``; False, and nothing is charged, if it has not that much left."""
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
        """Charge ``sender`` for what it was given already; if that is more than it has left, it owes the rest."""
        account = self._account(sender, self._clock())
        if account is not None:
            account.nbytes -= nbytes

    def _account(self, sender: str, now: float) -> _Account | None:
        account = self._accounts.get(sender)
        if account is None:
            if len(self._accounts) >= self._quota.senders and not self._forget(now):
                return None
            account = self._accounts[sender] = _Account(self._quota.messages, self._quota.nbytes, now)
        self._refill(account, now)
        return account

    def _forget(self, now: float) -> bool:
        sender, oldest = next(iter(self._accounts.items()))
        self._refill(oldest, now)
        if oldest.messages < self._quota.messages or oldest.nbytes < self._quota.nbytes:
            return False
        del self._accounts[sender]
        return True

    def _refill(self, account: _Account, now: float) -> None:
        share = max(now - account.since, 0.0) / self._quota.period
        account.messages = min(account.messages + share * self._quota.messages, self._quota.messages)
        account.nbytes = min(account.nbytes + share * self._quota.nbytes, self._quota.nbytes)
        account.since = now


class BandwidthLimiter:
    """``rate`` bytes in a second (above 0). What must not wait is spent, and owed; what can waits until nothing is owed.

    On one loop only. Over any stretch of time no more than ``rate`` times it, a quarter of a second's burst, and one piece of each
    stream that sends is let through, besides what is spent without waiting.
    """

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        if rate <= 0:
            raise ValueError("a rate must be above 0 bytes in a second")
        self._rate, self._clock = rate, clock
        self._left, self._since = rate * BURST_S, clock()
        self._lock: asyncio.Lock | None = None
        self.piece = max(int(rate * PIECE_S), 1)
        """Bytes that are sent at once."""

    def spend(self, nbytes: int) -> None:
        """Bytes that are sent now."""
        self._refill()
        self._left -= nbytes

    async def wait(self) -> None:
        """Until nothing is owed. Who waits longer goes first."""
        if self._lock is None:
            self._lock = asyncio.Lock()
        async with self._lock:
            while (owed := self.owed()) > 0:
                await asyncio.sleep(max(owed / self._rate, 0.001))

    def owed(self) -> float:
        """Bytes by which the budget is overdrawn; 0 or less if it is not."""
        self._refill()
        return -self._left

    def _refill(self) -> None:
        now = self._clock()
        self._left = min(self._left + (now - self._since) * self._rate, self._rate * BURST_S)
        self._since = now


class Counters:
    """What came and went on one topic. A rejected message has a reason; ``received`` are all that others published."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: Counter[str] = Counter()
        self._rejected: Counter[str] = Counter()

    def add(self, event: str, count: int = 1) -> None:
        """Count an event, such as ``sent``."""
        with self._lock:
            self._events[event] += count

    def reject(self, reason: str, count: int = 1) -> None:
        """Count a rejected message."""
        with self._lock:
            self._rejected[reason] += count

    def events(self) -> dict[str, int]:
        """Event -> how often, now."""
        with self._lock:
            return dict(self._events)

    def rejected(self) -> dict[str, int]:
        """Reason -> how many messages, now."""
        with self._lock:
            return dict(self._rejected)
