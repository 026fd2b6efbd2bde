"""In which round this node is with each fragment, and where a peer that comes too late should go."""

from __future__ import annotations


class Rounds:
    """Rounds grow by one with every fragment sent, so those of one fragment are ``fragments`` apart.

    A peer that began in the middle may have other remainders than the swarm: it too is told the swarm's.
    """

    def __init__(self, fragments: int) -> None:
        self.fragments = fragments
        self.next_round = 0
        """One beyond the furthest round begun, or what the node was told when it joined."""
        self._begun: dict[int, int] = {}
        self._over: dict[int, int] = {}

    def begin(self, round: int, fragment: int) -> None:
        """This node's contribution to ``round`` is there."""
        self.next_round = max(self.next_round, round + 1)
        self._begun[fragment] = max(round, self._begun.get(fragment, 0))

    def end(self, round: int, fragment: int) -> None:
        """Nobody can join ``round`` here any more: its group was formed, or this node has given it up."""
        self._over[fragment] = max(round, self._over.get(fragment, 0))

    def instead(self, round: int, fragment: int) -> int | None:
        """The round to which a contribution to ``round`` should move, or None if it is not too late, nor out of step."""
        over, begun = self._over.get(fragment), self._begun.get(fragment)
        if over is not None and round <= over:
            return max(over + self.fragments, -1 if begun is None else begun)
        if begun is not None and (round < begun or self._out_of_step(round, begun, fragment)):
            return begun + -(-max(round - begun, 0) // self.fragments) * self.fragments
        if over is None and begun is None and round < self.next_round:
            return round + -(-(self.next_round - round) // self.fragments) * self.fragments
        return None

    def _out_of_step(self, round: int, begun: int, fragment: int) -> bool:
        # A fragment beyond those of the schedule is the last average of all weights, which keeps no step.
        return fragment < self.fragments and (round - begun) % self.fragments != 0

    def within(self, wanted: int, mine: int, limit: int) -> int:
        """The round to move to from ``mine`` when a peer says ``wanted``: as far, but not beyond ``limit``."""
        beyond = max(wanted - limit, 0)
        return max(mine, wanted - -(-beyond // self.fragments) * self.fragments)
