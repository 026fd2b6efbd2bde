"""The rounds that a node's meetings with partners are in: ``PairRounds``.

Several meetings are under way at once, one for each fragment. A node numbers its contributions
itself and adds one shift to get the swarm's rounds. Why: docs/internals.md, "The round of a node".
"""

from __future__ import annotations

import threading


class PairRounds:
    """The numbers of one node's rounds.

    Thread-safe: the training thread hands in, the host's loop begins and moves. ``overlap``:
    training goes on while this node waits for a partner.
    """

    def __init__(self, fragments: int, overlap: bool = False) -> None:
        self.fragments, self.overlap = fragments, overlap
        self._lock = threading.Lock()
        self._handed_in = self._begun = -1
        """The own numbers of the newest contribution, as the training thread and as the loop sees
        it.
        """
        self._shift = self._known = 0
        """From own numbers to the swarm's rounds, and to those that the optimizer counts."""
        self._been: dict[int, int] = {}
        """The furthest round of each fragment that this node has been in."""

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

    def go_back(self, round: int) -> None:
        with self._lock:
            self._known = self._shift = round - (self._handed_in + 1)
            self._been = {}

    def hand_in(self, round: int) -> int:
        """Return the own number of a contribution that the optimizer hands in for ``round``."""
        with self._lock:
            number = round - self._known
            self._handed_in = max(self._handed_in, number)
            return number

    def leave_out(self) -> bool:
        """Let the number of the next contribution go by without one; return True.

        What is in flight still moves with the rest.
        """
        with self._lock:
            self._handed_in += 1
        return True

    def begin(self, number: int, round: int, fragment: int) -> None:
        """Note that the meeting of a contribution begins: from now on this node is in its round."""
        self._begun = max(self._begun, number)
        self._been[fragment] = max(round, self._been.get(fragment, 0))

    def move(self, number: int, round: int, fragment: int) -> None:
        """Note that a contribution moves to ``round``, and with it all that this node will send."""
        with self._lock:
            self._shift = max(self._shift, round - number)
        self._been[fragment] = max(round, self._been.get(fragment, 0))

    def instead(self, round: int, fragment: int, at: int | None) -> int | None:
        """Return the round to which a caller with ``fragment`` should move, or None: it is met in
        ``round``, now or once this node is there, or not at all (`through`). ``at``: the round of
        the meeting of that fragment that is under way here.
        """
        been, soon = self._been.get(fragment), self._begun + 1 + self._shift
        if at is not None and at > round:
            soon = at
        elif self.overlap and been is not None:
            soon = been
        return round + self._up(soon - round, fragment) if round != at and round < soon else None

    def next_of(self, round: int, fragment: int) -> int | None:
        """Return the next round of ``fragment`` that this node will begin; None if a caller for
        ``round`` is there, or beyond.
        """
        soon = self._begun + 1 + self._shift
        return round + self._up(soon - round, fragment) if round < soon else None

    def through(self, round: int, fragment: int, at: int | None) -> bool:
        """Return whether this node had its meeting in ``round`` and has not begun the next, or
        moved beyond and will not be there.

        Where training goes on meanwhile, a caller for that round must not be sent ahead to the next
        one: it would be there before the others, who would find it gone when they come, and be sent
        ahead themselves, ever further. So no peer moves to a round that nobody has begun, and the
        numbers grow as the quickest peer counts.
        """
        been, soon = self._been.get(fragment), self._begun + 1 + self._shift
        return self.overlap and been is not None and round != at and been <= round < soon

    def within(self, wanted: int, fragment: int, mine: int, limit: int) -> int:
        """Return the round to move to from ``mine`` when a peer answers ``wanted``: that far, but
        not beyond ``limit``.

        It is one of the same fragment, whatever the peer answers.
        """
        return mine + max(min(wanted, limit) - mine, 0) // self._step(fragment) * self._step(
            fragment
        )

    def _step(self, fragment: int) -> int:
        # A fragment beyond those of the schedule is the last average of all weights, which keeps no
        # step.
        return self.fragments if fragment < self.fragments else 1

    def _up(self, distance: int, fragment: int) -> int:
        step = self._step(fragment)
        return -(-distance // step) * step
