"""The rounds of a node that averages in groups: ``RoundTracker``.

How rounds are numbered: docs/internals.md, "The round of a node".
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from shoal.swarm.p2p.newest import Newest

REMEMBERED = 1024  # groups formed


class RoundTracker:
    """The rounds that a node has begun, joined and ended.

    Thread-safe: the training thread hands in, the host's loop begins and ends. A peer that began in
    the middle may have other remainders than the swarm: it gets the swarm's as an answer.
    """

    def __init__(self, fragments: int) -> None:
        self.fragments = fragments
        self._lock = threading.Lock()
        self.next_round = 0
        """One beyond the furthest round begun, or the round in which the node joined."""
        self._begun: dict[int, int] = {}
        self._over: dict[int, int] = {}
        self._handed_in: dict[int, int] = {}
        """By fragment the round for which its last contribution was due."""
        self._formed = Newest[tuple[int, int], None](REMEMBERED)
        self._elsewhere: dict[tuple[int, int], str] = {}

    def go_back(self, round: int) -> None:
        with self._lock:
            self.next_round, self._begun, self._over, self._handed_in = round, {}, {}, {}
            self._formed.clear()

    def begin(self, round: int, fragment: int) -> None:
        """Note that this node's contribution to ``round`` is there."""
        with self._lock:
            self.next_round = max(self.next_round, round + 1)
            self._begun[fragment] = max(round, self._begun.get(fragment, 0))

    def due(self, round: int, fragment: int) -> int:
        """Return the round of the next contribution of ``fragment``, which is handed in now: the
        one after the last that is over here, or was handed in; ``round``, as the optimizer counts,
        where there is none.
        """
        with self._lock:
            last = max(self._over.get(fragment, -1), self._handed_in.get(fragment, -1))
            due = round if last < 0 else last + self.fragments
            self._handed_in[fragment] = due
        return due

    def send_on(self, round: int, fragment: int) -> None:
        """Let the next contribution of ``fragment`` be one to ``round``."""
        with self._lock:
            self.next_round = max(self.next_round, round)
            self._handed_in[fragment] = round - self.fragments

    def taken(self, applied: Sequence[int]) -> None:
        """Note that the weights here are now those after the rounds ``applied``, by fragment."""
        with self._lock:
            for fragment, round in enumerate(applied):
                if round >= 0:
                    self._over[fragment] = max(round, self._over.get(fragment, 0))

    def join(self, round: int, fragment: int, leader: str) -> None:
        """Note that this node waits at ``leader`` for its group."""
        self._elsewhere[round, fragment] = leader

    def leave(self, round: int, fragment: int) -> None:
        self._elsewhere.pop((round, fragment), None)

    def end(self, round: int, fragment: int) -> None:
        """Note that this node's own part in ``round`` is over: its group was formed, or it has
        none.
        """
        with self._lock:
            if round <= self._begun.get(fragment, -1):  # else this node went back meanwhile
                self._over[fragment] = max(round, self._over.get(fragment, 0))
        self.leave(round, fragment)

    def formed(self, round: int, fragment: int) -> None:
        """Note that this node has formed the group, with its own contribution or without.

        That has no effect on other rounds: otherwise two peers could send this node far away.
        """
        self._formed[round, fragment] = None

    def leader(self, round: int, fragment: int) -> str | None:
        """Return the leader at which this node itself waits in ``round``, if it does."""
        return self._elsewhere.get((round, fragment))

    def instead(self, round: int, fragment: int) -> int | None:
        """Return the round to which a contribution to ``round`` should move, or None if it is
        neither late nor out of step.
        """
        over, begun = self._over.get(fragment), self._begun.get(fragment)
        if (over is not None and round <= over) or (round, fragment) in self._formed:
            return max(round, over or 0, (begun or 0) - self.fragments) + self.fragments
        # A fragment beyond those of the schedule is the last average of all weights, which keeps no
        # step.
        if begun is not None and (
            round < begun or (fragment < self.fragments and (round - begun) % self.fragments)
        ):
            return begun + self._up(max(round - begun, 0))
        if begun is None and over is None and round < self.next_round:
            return round + self._up(self.next_round - round)
        return None

    def _up(self, distance: int) -> int:
        return -(-distance // self.fragments) * self.fragments

    def within(self, wanted: int, mine: int, limit: int) -> int:
        """Return the round to move to from ``mine`` when a peer answers ``wanted``: that far, but
        not beyond ``limit``.
        """
        return max(mine, wanted - self._up(max(wanted - limit, 0)))
