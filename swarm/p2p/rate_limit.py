"""Accounts of traffic: token buckets that limit each sender, counters of events."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

MINUTE, HOUR = 60.0, 3600.0


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
        with self._lock:
            self._rejected[reason] += count

    def events(self) -> dict[str, int]:
        with self._lock:
            return dict(self._events)

    def rejected(self) -> dict[str, int]:
        """Return reason -> number of rejections."""
        with self._lock:
            return dict(self._rejected)
