"""The rounds that a node's meetings are in, when several are under way at once, one for each fragment.

Round numbers grow by one with every fragment sent, so those of one fragment are ``fragments`` apart; a contribution that moves to
another round keeps its remainder. All of a node's rounds move together: if the swarm is eight rounds further with one fragment, it
is with all. So a node numbers what it sends itself, and adds one ``shift`` to get the swarm's round. The optimizer, in whose thread
contributions are handed in, learns of a shift only when it applies an exchange; until then its numbers are lower.
"""

from __future__ import annotations

import threading


class PairRounds:
    """The numbers of one node's rounds. Thread-safe: the training thread hands in, the host's loop begins and moves."""

    def __init__(self, fragments: int) -> None:
        self.fragments = fragments
        self._lock = threading.Lock()
        self._handed_in = self._begun = -1
        """The own numbers of the newest contribution, as the training thread and as the loop sees it."""
        self._shift = self._known = 0
        """From own numbers to the swarm's rounds, and to those that the optimizer counts."""

    @property
    def next_round(self) -> int:
        """The swarm's round of the next contribution."""
        return self._handed_in + 1 + self._shift

    @next_round.setter
    def next_round(self, round: int) -> None:
        """Note which round the optimizer will hand in next."""
        with self._lock:
            self._known = round - (self._handed_in + 1)
            self._shift = max(self._shift, self._known)

    def hand_in(self, round: int) -> int:
        """Return the own number of a contribution that the optimizer hands in for ``round``."""
        with self._lock:
            number = round - self._known
            self._handed_in = max(self._handed_in, number)
            return number

    def begin(self, number: int) -> None:
        """Note that the meeting of a contribution begins: from now on this node is in its round."""
        self._begun = max(self._begun, number)

    def move(self, number: int, round: int) -> None:
        """Note that a contribution moves to ``round``, and with it all that this node will send."""
        with self._lock:
            self._shift = max(self._shift, round - number)

    def instead(self, round: int, fragment: int, at: int | None) -> int | None:
        """Return the round to which a caller with ``fragment`` should move, or None: it is met in ``round``, now or once this
        node is there. ``at``: the round of the meeting of that fragment that is under way here.
        """
        if round == at:
            return None
        least = at if at is not None and at > round else self._begun + 1 + self._shift
        return round + self._up(least - round, fragment) if round < least else None

    def within(self, wanted: int, fragment: int, mine: int, limit: int) -> int:
        """Return the round to move to from ``mine`` when a peer answers ``wanted``: that far, but not beyond ``limit``."""
        return max(mine, wanted - self._up(max(wanted - limit, 0), fragment))

    def _up(self, distance: int, fragment: int) -> int:
        # A fragment beyond those of the schedule is the last average of all weights, which keeps no step.
        step = self.fragments if fragment < self.fragments else 1
        return -(-distance // step) * step
