"""How much each sender may send: two token buckets per sender, and a bounded number of senders."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

MINUTE, HOUR = 60.0, 3600.0


@dataclass(frozen=True)
class Quota:
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


class Quotas:
    """The accounts of all senders. Not for several threads at once.

    A sender whose account is full again (it sent nothing for long enough) may be forgotten for a new one. As long as there is
    none such, new senders are refused: whoever makes up peer ids can keep strangers out, but not those who are here, and the
    whole never exceeds ``senders`` times the quota.
    """

    def __init__(self, quota: Quota, clock: Callable[[], float] = time.monotonic) -> None:
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
