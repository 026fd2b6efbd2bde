"""One node's attempt to have its contribution averaged: what it sends, what came of it, and what judges the others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from torch import Tensor

from shoal.optim.codecs.base import all_finite
from shoal.optim.codecs.mod4 import Reading
from shoal.optim.exchange.base import RoundKey
from shoal.optim.exchange.robust import TRUSTING, UpdateScreen
from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.exchange.contribution import Contribution
from shoal.swarm.exchange.stats import ExchangeStats, Problem
from shoal.swarm.wire.fields import Failure

R = TypeVar("R")
Received = list[Tensor] | Reading
"""A decoded contribution, or one of a codec for pairs as the own weights read it."""


@dataclass
class CommitState(Generic[R]):
    """The outcome of an attempt so far: decided once, by the host's loop that commits or by the training thread that closes it,
    whichever comes first.
    """

    received: R | None = None
    """Set at the commit."""
    closed: bool = False
    """True once the training thread has gone on: nothing may be committed any more."""
    awaited: bool = False
    """True once the training thread waits for the outcome."""
    leave_out: Callable[[], bool] | None = None
    """While the transfer with a partner is under way: leaves the next round out, unless the transfer has just begun."""
    _wake: Callable[[], object] = lambda: None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def commit(self, received: R) -> bool:
        """Set the outcome, in one assignment. Returns False, and changes nothing, if the training thread has gone on."""
        with self._lock:
            if not self.closed:
                self.received = received
            return not self.closed

    def when_awaited(self, wake: Callable[[], object]) -> None:
        """Have ``wake`` called once the training thread waits for the outcome, at once if it does."""
        with self._lock:
            self._wake, awaited = wake, self.awaited
        if awaited:
            wake()

    def await_outcome(self) -> None:
        """Note that the training thread waits from now on."""
        with self._lock:
            self.awaited, wake = True, self._wake
        wake()

    def close(self) -> R | None:
        """Return the outcome; None is final. Waits for nothing, so that a loop that hangs holds no training thread."""
        with self._lock:
            self.closed = True
            return self.received


@dataclass(frozen=True)
class ExchangeAttempt(Generic[R]):
    """A contribution, its commit state, and the screen and the statistics of the node that sends it."""

    contribution: Contribution
    commit: CommitState[R] = field(default_factory=CommitState)
    screen: UpdateScreen = TRUSTING
    stats: ExchangeStats = field(default_factory=ExchangeStats)

    @property
    def key(self) -> RoundKey:
        return self.contribution.key

    def moved_to(self, round: int) -> ExchangeAttempt[R]:
        """Return the attempt to have the same contribution averaged in another round. The commit state is shared."""
        return replace(self, contribution=replace(self.contribution, key=replace(self.key, round=round)))

    def failed(self, peer: str, problem: NetworkError | MessageError | Failure) -> None:
        """Count a failed exchange with ``peer``."""
        self.stats.failed(self.key, peer, problem)

    def problem(self, peer: str, payload: Tensor) -> tuple[Problem | None, Received]:
        """Return why the payload of ``peer`` cannot be used, or None, and what it says. Slow: for a worker thread."""
        mine, message = self.contribution, self.contribution.message
        try:
            read = None if message is None else message.read(payload)
            tensors = mine.codec.decode(payload, mine.shapes) if message is None or read is None else message.seen(read)
        except ValueError as error:  # raised by codecs at bytes that no peer of this version encodes
            return Problem("damaged", f"it is not {mine.codec.name}: {error}"), []
        received = tensors if read is None else read
        if not all_finite(tensors):
            return Problem("damaged", "it holds NaN or infinity"), received
        distrust = self.screen.problem(self.key, mine.tensors, peer, tensors)
        return None if distrust is None else Problem("suspicious", distrust), received
