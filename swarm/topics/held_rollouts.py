"""The rollouts that a pool holds until training takes them: bounded, and none too old.

A record is of use for ``ttl`` seconds, or longer where this node's rounds are: what came in a long
round is not too old at its end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.swarm.p2p.rate_limit import RateLimit
from shoal.swarm.topics.rollout import Rollout

MAX_TTL_S = 3600.0
"""That a record lasts however long the rounds of this node take."""


@dataclass(frozen=True)
class PoolLimits:
    """The limits on what a pool accepts and keeps."""

    ttl: float = 600.0
    """Seconds since the record was issued; it lasts longer if this node's last round began before.
    """
    per_sender: int = 64
    """Records of one author held at a time; a newer one displaces the oldest."""
    records: int = 1024
    """Records held at a time, of all authors."""
    nbytes: int = 128 << 20
    """Bytes held at a time."""
    quota: RateLimit = field(default_factory=RateLimit)
    """The limit of one publisher in a minute."""


class HeldRollouts:
    """Rollouts in the order of arrival. Not for several threads at once."""

    def __init__(self, limits: PoolLimits, clock: Callable[[], float]) -> None:
        self.expired = 0
        """Of those that were added, how many became too old here."""
        self.displaced = 0
        """Of those that were added, how many newer ones took the place of."""
        self._limits = limits
        self._clock = clock
        self._held: list[Rollout] = []
        self._round_began = clock()
        self._round_before_began = self._round_began

    def __len__(self) -> int:
        return len(self._held)

    def advance(self) -> None:
        """Note that this node begins another round."""
        self._round_before_began = self._round_began
        self._round_began = self._clock()

    def oldest(self) -> float:
        """Return when the oldest record that is of use was issued."""
        now = self._clock()
        return max(min(now - self._limits.ttl, self._round_before_began), now - MAX_TTL_S)

    def add(self, rollout: Rollout) -> None:
        self._held.append(rollout)
        self._expire()
        self._make_room(rollout.peer)

    def take(self) -> list[Rollout]:
        """Return all that are not too old, and hold none of them any more."""
        self._expire()
        held = self._held
        self._held = []
        return held

    def _make_room(self, author: str) -> None:
        before = len(self._held)
        theirs = [at for at, held in enumerate(self._held) if held.peer == author]
        if len(theirs) > self._limits.per_sender:
            del self._held[theirs[0]]
        nbytes = sum(held.nbytes for held in self._held)
        while self._held:
            if len(self._held) <= self._limits.records and nbytes <= self._limits.nbytes:
                break
            nbytes -= self._held.pop(0).nbytes
        self.displaced += before - len(self._held)

    def _expire(self) -> None:
        oldest = self.oldest()
        fresh = [held for held in self._held if held.issued >= oldest]
        self.expired += len(self._held) - len(fresh)
        self._held = fresh
