"""How often, and with how many bytes, each of a bounded number of senders may come."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

MINUTE_S = 60.0
HOUR_S = 3600.0


@dataclass(frozen=True)
class RateLimit:
    """Messages and bytes that one sender may send in ``period`` seconds, in one burst or not; and
    the number of senders.
    """

    messages: int = 1200
    nbytes: int = 64 << 20
    senders: int = 1024
    period: float = MINUTE_S


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
