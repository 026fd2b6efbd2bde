"""What a round came to, of totals that only grow: bytes, tokens and seconds of waiting."""

from __future__ import annotations

from typing import Generic, TypeVar

N = TypeVar("N", int, float)


class Increase(Generic[N]):
    """What a total has grown by: ``increase(total)`` returns that since the call before."""

    def __init__(self, total: N) -> None:
        self._before: N = total

    def __call__(self, total: N) -> N:
        increase: N = total - self._before
        self._before = total
        return increase


class RoundTotals:
    """What was counted since the call before; for the thread that trains."""

    def __init__(self) -> None:
        self.sent = Increase(0)
        self.received = Increase(0)
        self.tokens = Increase(0)
        self.waited = Increase(0.0)
