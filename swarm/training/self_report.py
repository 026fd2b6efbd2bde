"""A node's account of its own exchanges and of missing members, for its record in the directory and for its user."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

from shoal.swarm.exchange.stats import RECENT, ExchangeStats
from shoal.swarm.membership.partition_detector import PartitionDetector
from shoal.swarm.membership.view import DirectoryView
from shoal.swarm.p2p.stream import short
from shoal.swarm.wire.fields import Sketch
from shoal.swarm.wire.member import MAX_MISSING, Member

LOOK_S = 1.0  # seconds between two looks at the members: records change every five
AGAIN_S = 600.0  # seconds between two sentences about weights that differ: a hostile peer may say so of its own in each round


class SelfReport:
    """One node's account. ``sketch`` gives a sketch of the slow weights (``shoal.swarm.state.drift``); ``clock``: seconds."""

    def __init__(
        self,
        stats: ExchangeStats,
        directory: DirectoryView,
        me: str,
        sketch: Callable[[], Sketch | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stats, self._directory, self._sketch, self._clock = stats, directory, sketch, clock
        self.absence = PartitionDetector(me)
        self._waits: deque[float] = deque(maxlen=RECENT)
        self._looked = float("-inf")
        self._apart: dict[bool, float] = {}
        """When it was said last that weights differ, by whether this node gives way."""
        self._news: list[str] = []

    def waited(self, seconds: float) -> None:
        """Note that training stood still for ``seconds`` in the round that has just ended."""
        self._waits.append(seconds)

    def apart(self, peers: Collection[str], members: Mapping[str, Member], gives_way: bool) -> None:
        """Note, for ``news``, that the weights of ``peers`` differ from this node's; once for each event."""
        now = self._clock()
        if not peers or now - self._apart.get(gives_way, float("-inf")) < AGAIN_S:
            return
        self._apart[gives_way] = now
        names = [members[peer].name if peer in members else short(peer) for peer in sorted(peers)]
        them = "1 other member" if len(names) == 1 else f"{len(names)} other members"
        them += f" ({', '.join(names[:MAX_MISSING])}{', …' if len(names) > MAX_MISSING else ''})"
        who = (
            f"this node's weights differ from those of {them}, so it takes over theirs"
            if gives_way
            else f"the weights of {them} differ from this node's, and are to give way to them"
        )
        self._news.append(f"{who}; to load other weights on purpose, call opt.restart_from_model() on all members")

    def news(self) -> list[str]:
        """Return the sentences about differing weights that were not returned yet."""
        news, self._news = self._news, []
        return news

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
