"""The rounds of this node, by fragment, and the round to which a late peer should move."""

from __future__ import annotations

from collections import OrderedDict

REMEMBERED = 1024


class RoundTracker:
    """The rounds that a node has begun, joined and ended. Round numbers grow by one with every fragment sent, so those of one
    fragment are ``fragments`` apart.

    A peer that began in the middle may have other remainders than the swarm: it gets the swarm's as an answer.
    """

    def __init__(self, fragments: int) -> None:
        self.fragments = fragments
        self.next_round = 0
        """One beyond the furthest round begun, or the round in which the node joined."""
        self._begun: dict[int, int] = {}
        self._over: dict[int, int] = {}
        self._formed: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._elsewhere: dict[tuple[int, int], str] = {}

    def go_back(self, round: int) -> None:
        """Note that the optimizer goes on in ``round``, though this node has been in later ones."""
        self.next_round, self._begun, self._over = round, {}, {}
        self._formed.clear()

    def begin(self, round: int, fragment: int) -> None:
        """Note that this node's contribution to ``round`` is there."""
        self.next_round = max(self.next_round, round + 1)
        self._begun[fragment] = max(round, self._begun.get(fragment, 0))

    def join(self, round: int, fragment: int, leader: str) -> None:
        """Note that this node waits at ``leader`` for its group."""
        self._elsewhere[round, fragment] = leader

    def leave(self, round: int, fragment: int) -> None:
        """Note that it no longer waits there."""
        self._elsewhere.pop((round, fragment), None)

    def end(self, round: int, fragment: int) -> None:
        """Note that this node's own part in ``round`` is over: its group was formed, or it has none."""
        if round < self.next_round:  # else this node went back while it was in it
            self._over[fragment] = max(round, self._over.get(fragment, 0))
        self.leave(round, fragment)

    def formed(self, round: int, fragment: int) -> None:
        """Note that this node has formed the group, with its own contribution or without.

        That has no effect on other rounds: otherwise two peers could send this node far away.
        """
        self._formed[round, fragment] = None
        while len(self._formed) > REMEMBERED:
            self._formed.popitem(last=False)

    def leader(self, round: int, fragment: int) -> str | None:
        """Return the leader at which this node itself waits in ``round``, if it does."""
        return self._elsewhere.get((round, fragment))

    def instead(self, round: int, fragment: int) -> int | None:
        """Return the round to which a contribution to ``round`` should move, or None if it is neither late nor out of step."""
        over, begun = self._over.get(fragment), self._begun.get(fragment)
        if (over is not None and round <= over) or (round, fragment) in self._formed:
            return max(round, over or 0, (begun or 0) - self.fragments) + self.fragments
        if begun is not None and (round < begun or self._out_of_step(round, begun, fragment)):
            return begun + self._up(max(round - begun, 0))
        if begun is None and round < self.next_round:
            return round + self._up(self.next_round - round)
        return None

    def _out_of_step(self, round: int, begun: int, fragment: int) -> bool:
        # A fragment beyond those of the schedule is the last average of all weights, which keeps no step.
        return fragment < self.fragments and (round - begun) % self.fragments != 0

    def _up(self, distance: int) -> int:
        return -(-distance // self.fragments) * self.fragments

    def within(self, wanted: int, mine: int, limit: int) -> int:
        """Return the round to move to from ``mine`` when a peer answers ``wanted``: that far, but not beyond ``limit``."""
        return max(mine, wanted - self._up(max(wanted - limit, 0)))
