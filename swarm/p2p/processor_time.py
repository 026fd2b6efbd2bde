"""How much processor time the answers to others may take.

    processor_time = ProcessorTime()
    if not processor_time.take_stream(peer, host, is_member=False):
        ...  # refuse it
    await processor_time.charged(answer(stream), peer, host, is_member=False)

Every step of an answer is measured by the clock of its thread, which stands still while the answer
waits. Peers that are no members have a small budget, each and their address range together, members
a wide one. Why so: docs/internals.md, "Processor time of strangers".
"""

from __future__ import annotations

import time
import types
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from shoal.swarm.p2p.addresses import range_of
from shoal.swarm.p2p.rate_limit import MINUTE_S, RateLimit, TokenBuckets

T = TypeVar("T")

MICROSECONDS = 1_000_000
"""In a second: the bucket counts whole ones."""
MAX_SENDERS = 4096
STREAM_S = 0.0002
"""What a stream costs beside its handler, also if it is refused: the daemon's message about it, its
objects, its end."""


@dataclass(frozen=True)
class TimeLimits:
    """Seconds of processor time in ``period_s`` seconds, in one burst or not: of each peer, and of
    all of its address range together.
    """

    of_peer_s: float
    of_range_s: float
    period_s: float


STRANGERS = TimeLimits(of_peer_s=0.2, of_range_s=0.5, period_s=10.0)
"""A newcomer's questions take some ms. 5 % of one processor for an address range."""
MEMBERS = TimeLimits(of_peer_s=30.0, of_range_s=45.0, period_s=MINUTE_S)
"""Beyond what an exchange of weights takes at the speed of the daemon."""


class _Budget:
    """The time of strangers, or that of members."""

    def __init__(self, limits: TimeLimits, clock: Callable[[], float]) -> None:
        self._peers = _buckets(limits.of_peer_s, limits.period_s, clock)
        self._ranges = _buckets(limits.of_range_s, limits.period_s, clock)

    def take_stream(self, peer: str, place: str) -> bool:
        microseconds = int(STREAM_S * MICROSECONDS)
        if not self._peers.take(peer, 0, microseconds):
            return False
        if not self._ranges.take(place, 0, microseconds):
            self._peers.charge(peer, -microseconds)  # given back
            return False
        return True

    def charge(self, peer: str, place: str, microseconds: int) -> None:
        self._peers.charge(peer, microseconds)
        self._ranges.charge(place, microseconds)


def _buckets(seconds: float, period_s: float, clock: Callable[[], float]) -> TokenBuckets:
    nbytes = int(seconds * MICROSECONDS)
    return TokenBuckets(RateLimit(0, nbytes, senders=MAX_SENDERS, period=period_s), clock)


class ProcessorTime:
    """The budgets of all peers. On one loop.

    ``clock``: seconds, by which budgets fill again; ``used``: seconds for which this thread has
    computed so far.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.thread_time,
        strangers: TimeLimits = STRANGERS,
        members: TimeLimits = MEMBERS,
    ) -> None:
        self._used = used
        self._strangers = _Budget(strangers, clock)
        self._members = _Budget(members, clock)

    def take_stream(self, peer: str, host: str, *, is_member: bool) -> bool:
        """Charge a peer for a stream; return False, charging nothing, if its time, or that of all
        in the address range of its ``host``, is used up.
        """
        return self._budget(is_member).take_stream(peer, range_of(host))

    async def charged(self, work: Awaitable[T], peer: str, host: str, *, is_member: bool) -> T:
        """Return what ``work`` returns, and charge the peer for the time that it computes."""
        budget = self._budget(is_member)
        place = range_of(host)

        def charge(seconds: float) -> None:
            budget.charge(peer, place, round(seconds * MICROSECONDS))

        return await _measured(work, charge, self._used)

    def _budget(self, is_member: bool) -> _Budget:
        return self._members if is_member else self._strangers


@types.coroutine
def _measured(
    work: Awaitable[T], spent: Callable[[float], None], used: Callable[[], float]
) -> Generator[Any, Any, T]:
    """Do ``work``, and call ``spent`` after each of its steps with the seconds that it computed."""
    steps = work.__await__()
    error: BaseException | None = None
    while True:
        begun = used()
        try:
            waits_for = next(steps) if error is None else steps.throw(error)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            error = None
            spent(used() - begun)
        try:
            yield waits_for
        except BaseException as thrown:  # as when the task is cancelled
            error = thrown
