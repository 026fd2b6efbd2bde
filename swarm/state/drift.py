"""Whether this node's slow weights are still its group's, by sketches of them.

With the same rules each peer shows a sketch of its slow weights after its newest round
(`shoal.optim.outer.weights`) in its record, and with its next contribution. After a network
partition, or where one peer's weights were changed behind its optimizer, nothing else would show
that two parts differ. The smaller part gives way: docs/internals.md, "Weights that diverged".
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from shoal.swarm.p2p.newest import Newest
from shoal.swarm.wire.envelope import Sketch, real
from shoal.swarm.wire.messages import Member

# Own rounds to compare others' sketches with: records are some seconds old.
ROUNDS_KEPT = 64
MOVES_KEPT = 8  # of a fragment, from one round to the next, of which the median is the usual one
# Of a round's usual movement, above which weights differ: a missed round makes about 1, rounding
# 1e-4 and later more.
APART_SHARE = 0.25
# Of the sketch: below it weights that hardly move any more differ by rounding alone.
PRECISION = 1e-5
# rounds in a row that a node must find itself in the smaller part while some peers cannot be
# compared
DOUBTFUL_ROUNDS = 3


@dataclass(frozen=True)
class SplitDecision:
    """Decision that this node takes over the weights of one of ``sources``, in ``fragments``."""

    fragments: frozenset[int]
    sources: frozenset[str]


class DriftDetector:
    """Detector of a difference between this node's slow weights and its group's.

    ``me``: this node's peer id. ``model``: members with another one are not compared. ``most``: the
    largest group; among more members a round has several groups, whose weights differ by design.
    """

    def __init__(self, me: str, model: str, most: int) -> None:
        self._me = me
        self._model = model
        self._most = most
        self._own = Newest[tuple[int, int], tuple[Sequence[float], float]](ROUNDS_KEPT)
        self._last: dict[int, Sequence[float]] = {}
        self._moves: dict[int, deque[float]] = {}
        self._doubts = 0
        self.newest: Sketch | None = None
        self.apart: frozenset[str] = frozenset()
        """The peers whose weights differ from this node's by the last call of ``split``, if it came
        to an end.
        """

    def finished(self, round: int, fragment: int, sketch: tuple[float, ...]) -> None:
        """Record the sketch of the slow weights of ``fragment`` after ``round``."""
        # A record with such a number could not be published, and equals nobody's.
        if any(real(number) is None for number in sketch):
            self.moved()
            return
        if fragment in self._last:
            moves = self._moves.setdefault(fragment, deque(maxlen=MOVES_KEPT))
            moves.append(math.dist(sketch, self._last[fragment]))
        self._last[fragment] = sketch
        self._own[round, fragment] = sketch, self._limit(fragment, sketch)
        self.newest = round, fragment, sketch

    def _limit(self, fragment: int, sketch: Sequence[float]) -> float:
        """Return the distance beyond which another's sketch differs from this one."""
        moves = self._moves.get(fragment, ())
        if not moves:
            return float("inf")
        least = PRECISION * max(abs(number) for number in sketch)
        return max(APART_SHARE * median(moves), least)

    def moved(self) -> None:
        """Forget the own sketches: the slow weights were replaced by others'."""
        self._own.clear()
        self._last.clear()
        self.newest = None
        self._doubts = 0

    def split(
        self,
        members: Mapping[str, Member],
        group: Mapping[str, Sketch | None],
        partners: Collection[str],
    ) -> SplitDecision | None:
        """Return the decision to give way, or None, by the records of ``partners`` and by what this
        round's group has shown.

        Call it once a round. The group's are newer, and signed by who shows them, so nobody but
        their author can make them up. ``partners``: with which this node has exchanged; keys are
        free, so others' records would make any majority.
        """
        self.apart = frozenset()
        others = self._shown(members, group, partners)
        if len(others) + 1 > self._most:
            return None
        near, far, fragments, unknown = self._compare(others)
        if not far or len(near) > len(far) or (len(near) == len(far) and min(near) < min(far)):
            self._doubts = 0
            self.apart = frozenset(far)
            return None
        self._doubts += 1
        if unknown and self._doubts < DOUBTFUL_ROUNDS:
            return None
        self._doubts = 0
        self.apart = frozenset(far)
        return SplitDecision(frozenset(fragments), self.apart)

    def _shown(
        self,
        members: Mapping[str, Member],
        group: Mapping[str, Sketch | None],
        partners: Collection[str],
    ) -> dict[str, Sketch | None]:
        """Return other peer -> its newest sketch; None if nothing is known of it."""
        shown: dict[str, Sketch | None] = {}
        for peer, member in members.items():
            if peer == self._me or peer not in partners or member.model != self._model:
                continue
            # A record that still says "waiting" counts as one of whom nothing is known: quick
            # rounds are over before the next one.
            if member.state == "training":
                shown[peer] = member.sketch
            elif member.state == "waiting":
                shown[peer] = None
        return shown | dict(group)

    def _compare(
        self, others: Mapping[str, Sketch | None]
    ) -> tuple[set[str], set[str], set[int], bool]:
        """Return the peers that hold what this node holds, the others, the fragments in which these
        differ, and whether any peer could not be compared.
        """
        near = {self._me}
        far = set[str]()
        fragments = set[int]()
        unknown = False
        for peer, sketch in others.items():
            own = None if sketch is None else self._own.get(sketch[:2])
            if sketch is None or own is None:
                unknown = True
                continue
            own_sketch, limit = own
            if math.dist(own_sketch, sketch[2]) <= limit:
                near.add(peer)
            else:
                far.add(peer)
                fragments.add(sketch[1])
        return near, far, fragments, unknown
