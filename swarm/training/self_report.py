"""A node's account of its own exchanges and of missing members, for its record in the directory and for its user."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from shoal.swarm.exchange.stats import RECENT, ExchangeStats
from shoal.swarm.membership.partition_detector import PartitionDetector
from shoal.swarm.membership.view import DirectoryView

LOOK_S = 1.0  # seconds between two looks at the members: records change every five


class SelfReport:
    """One node's account. ``sketch`` gives a sketch of the slow weights (``shoal.swarm.state.drift``); ``clock``: seconds."""

    def __init__(
        self,
        stats: ExchangeStats,
        directory: DirectoryView,
        me: str,
        sketch: Callable[[], tuple[int, int, tuple[float, ...]] | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stats, self._directory, self._sketch, self._clock = stats, directory, sketch, clock
        self.absence = PartitionDetector(me)
        self._waits: deque[float] = deque(maxlen=RECENT)
        self._looked = float("-inf")

    def waited(self, seconds: float) -> None:
        """Note that training stood still for ``seconds`` in the round that has just ended."""
        self._waits.append(seconds)

    def details(self) -> dict[str, Any]:
        """Return the fields of this node's ``Member`` that have defaults."""
        suspected = self.absence.suspected
        return {
            **self.stats.report(),
            "wait_s": sum(self._waits) / len(self._waits) if self._waits else 0.0,
            "sketch": self._sketch(),
            **(suspected.fields() if suspected is not None else {}),
        }

    def events(self) -> list[str]:
        """Return sentences about members that vanished or came back. Looks at most once a second, and touches no network."""
        now = self._clock()
        if now - self._looked < LOOK_S:
            return []
        self._looked = now
        return self.absence.look(self._directory.everyone(), self._directory.departed(), now, self._directory.belongs)
