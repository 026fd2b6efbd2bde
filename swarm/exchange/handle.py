"""The synchronous side of network exchanges: the training thread's handle on a round that runs on the host's loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from shoal.optim.exchange.base import Mean
from shoal.swarm.exchange.attempt import ExchangeAttempt
from shoal.swarm.exchange.context import ExchangeTimeouts, Patience
from shoal.swarm.exchange.round_evidence import RoundEvidence
from shoal.swarm.exchange.stats import ExchangeStats
from shoal.swarm.wire.fields import Sketch

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host

SLICE_S = 0.1

R = TypeVar("R")


class RoundCounter(Protocol):
    """A holder of the number of a node's next round."""

    next_round: int

    def go_back(self, round: int) -> None:
        """Note that the optimizer goes on in ``round``, though this node has been in later ones."""
        ...


class ExchangeBase:
    """Base of network exchanges: round counter, time limit, statistics of waits and failures."""

    def __init__(
        self, host: Host, counter: RoundCounter, evidence: RoundEvidence, timeouts: ExchangeTimeouts, patience: Patience
    ) -> None:
        self.host, self._evidence = host, evidence
        host.resource_manager.partner = evidence.knows
        self._counter, self._timeouts, self._patience = counter, timeouts, patience
        self.moved = 0
        """Bytes each way of the newest round."""
        self.until = float("inf")
        self.stats = ExchangeStats()
        """The outcomes of its exchanges."""
        self.waited = 0.0
        """Total seconds for which the calling thread was blocked here."""
        self.sketch: Callable[[], Sketch | None] = lambda: None
        """This node's newest sketch, to be shown to its group."""

    @property
    def sketches(self) -> Mapping[str, Sketch | None]:
        """Return what the other members of the newest group have shown, by peer id."""
        return {}

    @property
    def partners(self) -> frozenset[str]:
        """The peers with which this node has exchanged: a record alone costs nothing, and counts for nobody's weights."""
        return self._evidence.partners

    @property
    def limit(self) -> float:
        """Seconds that the newest round can take at most."""
        return self.limit_of(self.moved, 0)

    def limit_of(self, nbytes: int, fragment: int) -> float:
        """Return the seconds that a round of ``fragment`` can take at most, in which ``nbytes`` bytes are moved each way."""
        return self._timeouts.limit(self._patience.of(self._timeouts, fragment), nbytes)

    @property
    def next_round(self) -> int:
        """The number of the next round; more than one above the last one's if this node caught up with the swarm."""
        return self._counter.next_round

    @next_round.setter
    def next_round(self, round: int) -> None:
        self._counter.next_round = round

    def back(self, round: int) -> int | None:
        """Return the round that the optimizer, about to go on in ``round``, should go back to, where the others are; None if it
        is with them.
        """
        to = self._evidence.back(round)
        if to is not None:
            self._counter.go_back(to)
        return to

    def hurry(self, seconds: float) -> None:
        """Limit every round to ``seconds`` from now on, because the node is about to leave. Callable from a signal handler."""
        self.until = time.monotonic() + seconds


class ExchangeHandle(Generic[R]):
    """One round in flight: ``work`` runs on the host's loop and leaves its outcome in the attempt's commit state."""

    def __init__(
        self, exchange: ExchangeBase, attempt: ExchangeAttempt[R], work: Coroutine[Any, Any, R | None], mean: Callable[[R], Mean]
    ) -> None:
        self._exchange, self._attempt, self._make, self._moves = exchange, attempt, mean, exchange.moved
        self._future: concurrent.futures.Future[R | None] = exchange.host.submit(work)
        self._mean: Mean | None = None

    @property
    def limit(self) -> float:
        """Seconds that ``result`` waits at most."""
        return self._exchange.limit_of(self._moves, self._attempt.key.fragment)

    def done(self) -> bool:
        """Return whether ``result`` would return at once."""
        return self._future.done()

    def leave_out(self) -> bool:
        """Leave the next round out if the transfer with a partner is under way (`shoal.optim.exchange.base.Lasting`)."""
        leave_out = self._attempt.commit.leave_out
        return leave_out is not None and not self._future.done() and leave_out()

    def result(self, deadline: float | None = None) -> Mean | None:
        """Wait at most ``deadline`` seconds (None: the exchange's own limits); then give the round up and return None."""
        began = time.monotonic()
        if not self._future.done():
            self._attempt.commit.await_outcome()
        limit = self.limit if deadline is None else min(deadline, self.limit)
        try:
            received = self._wait(began + limit)
        except concurrent.futures.CancelledError:
            received = self._attempt.commit.received
        finally:
            self._exchange.waited += time.monotonic() - began
        return self._mean_of(received)

    def close(self) -> None:
        """Give the round up without waiting, so that the partner does not count a contribution that is dropped here."""
        self._attempt.commit.close()
        self._future.cancel()

    async def settled(self) -> Mean | None:
        """Do the same as ``result()`` in a coroutine on the host's loop, by the loop's clock."""
        work = asyncio.wrap_future(self._future)
        if not work.done():
            self._attempt.commit.await_outcome()
        await asyncio.wait({work}, timeout=self.limit)
        if not work.done():
            self.close()
            await asyncio.wait({work})
        return self._mean_of(self._attempt.commit.received if work.cancelled() else work.result())

    def _mean_of(self, received: R | None) -> Mean | None:
        if received is not None and self._mean is None:  # once, for it is computed in place
            self._mean = self._make(received)
        return self._mean

    def _wait(self, until: float) -> R | None:
        while True:
            left = min(until, self._exchange.until) - time.monotonic()
            if left <= 0 and not self._future.done():
                self.close()
            try:
                # In slices: ``hurry`` may shorten the wait, and a signal handler runs only between two of them.
                return self._future.result(min(max(left, 0), SLICE_S))
            except (concurrent.futures.TimeoutError, asyncio.TimeoutError):
                continue
