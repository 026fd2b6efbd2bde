"""What the exchanges of the network have in common: `ExchangeBase`, and `ExchangeHandle`, by which
the training thread holds a round that runs on the host's loop.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic

from shoal.optim.device import give_freed_back
from shoal.optim.exchange.base import Exchange, Handle, Mean, RoundKey
from shoal.swarm.exchange.contribution import ExchangeAttempt, ExchangeStats, R
from shoal.swarm.exchange.pair_rounds import PairRounds
from shoal.swarm.exchange.round_evidence import RoundEvidence
from shoal.swarm.exchange.round_time import RoundTime
from shoal.swarm.exchange.round_tracker import RoundTracker
from shoal.swarm.wire.envelope import Sketch

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host

SLICE_S = 0.1  # seconds that a training thread waits at once


class ExchangeBase(Exchange):
    """Base of network exchanges: round counter, time limit, statistics of waits and failures."""

    def __init__(
        self,
        host: Host,
        rounds: PairRounds | RoundTracker,
        evidence: RoundEvidence,
        time: RoundTime,
    ) -> None:
        self.host, self.rounds, self.evidence, self.time = host, rounds, evidence, time
        host.resource_manager.partner = evidence.knows
        self.until = float("inf")
        self.stats = ExchangeStats(host.internal_errors)
        """The outcomes of its exchanges."""
        self.waited = 0.0
        """Total seconds for which the calling thread was blocked here."""
        self.sketch: Callable[[], Sketch | None] = lambda: None
        """This node's newest sketch, to be shown to its group."""
        self.sketches: Mapping[str, Sketch | None] = {}
        """What the others of the newest group have shown, by peer id, if a round has one group;
        replaced as a whole.
        """

    @property
    def next_round(self) -> int:
        """The number of the next round; more than one above the last one's if this node caught up
        with the swarm.
        """
        return self.rounds.next_round

    @next_round.setter
    def next_round(self, round: int) -> None:
        self.rounds.next_round = round

    def behind(self, key: RoundKey, round: int) -> int:
        """Return by how many rounds the contribution that was handed in as ``key``, and is over,
        counted later. ``round``: the one that the optimizer goes on in.
        """
        return max(self.next_round - round, 0)

    def took_over(self, applied: Sequence[int], *, newcomer: bool = False) -> None:
        """Note that this node goes on from weights of the rounds ``applied``, by fragment.

        ``newcomer``: they are those of a swarm that is under way without it.
        """

    def back(self, round: int) -> int | None:
        """Return the round that the optimizer, about to go on in ``round``, should go back to,
        where the others are; None if it is with them.
        """
        to = self.evidence.back(round)
        if to is not None:
            self.rounds.go_back(to)
        return to

    def end(self) -> None:
        """Note that this node's last step is done, and its rounds are over: whoever waits for it in
        another is told so. For the thread that trains.
        """
        raise NotImplementedError

    def hurry(self, seconds: float) -> None:
        """Limit every round to ``seconds`` from now on, because the node is about to leave.

        Callable from a signal handler.
        """
        self.until = time.monotonic() + seconds


class ExchangeHandle(Handle, Generic[R]):
    """One round in flight: ``work`` runs on the host's loop and leaves its outcomes in the
    attempt. ``nbytes``: each way.
    """

    def __init__(
        self,
        exchange: ExchangeBase,
        attempt: ExchangeAttempt[R],
        work: Coroutine[Any, Any, object],
        mean: Callable[[tuple[R, ...]], Mean],
        nbytes: int,
    ) -> None:
        self._exchange, self._attempt, self._make, self._nbytes = exchange, attempt, mean, nbytes
        self._future: concurrent.futures.Future[object] = exchange.host.submit(work)
        self._mean: Mean | None = None

    @property
    def limit(self) -> float:
        """Seconds that ``result`` waits at most."""
        return self._exchange.time.limit(self._nbytes, self._attempt.key.fragment)

    def done(self) -> bool:
        return self._future.done()

    def leave_out(self) -> bool:
        """Leave the next round out if the transfer with a partner is under way."""
        return not self._future.done() and self._attempt.leave_out()

    def result(self, deadline: float | None = None) -> Mean | None:
        """Wait at most ``deadline`` seconds (None: the exchange's own limits); then give the round
        up and return None. Raises ContributionError if the codec refuses what was handed in.
        """
        began = time.monotonic()
        if not self._future.done():
            self._attempt.commit.await_outcome()
            # such as the gradients of the last step: what is received takes as much memory
            give_freed_back()
        limit = self.limit if deadline is None else min(deadline, self.limit)
        try:
            with contextlib.suppress(concurrent.futures.CancelledError):
                self._wait(began + limit)
        finally:
            self._exchange.waited += time.monotonic() - began
        self.encode()
        return self._mean_of(self._attempt.outcomes())

    def encode(self) -> None:
        self._attempt.contribution.payload.encoded()

    def close(self) -> None:
        """Give the round up without waiting, so that the partner does not count a contribution that
        is dropped here.
        """
        self._attempt.close()
        self._future.cancel()

    def _mean_of(self, outcomes: tuple[R, ...]) -> Mean | None:
        if outcomes and self._mean is None:  # once, for it is computed in place
            self._mean = self._make(outcomes)
        return self._mean

    def _wait(self, until: float) -> None:
        while True:
            left = min(until, self._exchange.until) - time.monotonic()
            if left <= 0 and not self._future.done():
                self.close()
            try:
                # In slices: ``hurry`` may shorten the wait, and a signal handler runs only between
                # two of them.
                self._future.result(min(max(left, 0), SLICE_S))
                return
            except (TimeoutError, concurrent.futures.TimeoutError):
                continue
