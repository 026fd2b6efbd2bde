"""Detecting that parts of a group hold different slow weights, and deciding which part gives way.

For methods whose peers all hold the same slow weights (`Anchored` rules). Each peer shows a sketch of its slow weights after its
newest round (`shoal.optim.outer.sketch`) in its record, and with its next contribution to its group, and compares the others' with
its own after that round. After a network partition in which both parts stayed in the same rounds, or where one peer's weights were
changed behind its optimizer, nothing else would show that they differ. The rule:

* A peer that is behind in rounds moves to the round of the others and takes over their weights, as any late peer does.
* In the same round the smaller part takes over the weights of the larger one; of two equal parts, the one without the lowest peer
  id. What that part has learnt since the split is lost but for the steps of the current round; its data, inner optimizers and steps
  go on.

Each node counts the parts itself: those that hold what it holds, against all others. If none is a majority all give way but for the
lowest peer id among those of the latest round that ask each other (`StateServer`), so one set of weights is left.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from shoal.optim.outer.sketch import distance
from shoal.swarm.wire.fields import Sketch, real
from shoal.swarm.wire.member import Member

REMEMBERED = 64  # own rounds to compare others' sketches with: records are some seconds old
APART = 0.25
"""Fraction of a round's usual movement above which weights differ: a missed round makes about 1, rounding 1e-4 and later more."""
PRECISION = 1e-5  # of the sketch: below it weights that hardly move any more differ by rounding alone
DOUBTS = 3  # rounds in a row that a node must find itself in the smaller part while some peers cannot be compared


@dataclass(frozen=True)
class SplitDecision:
    """Decision that this node takes over the weights of one of ``sources``, in ``fragments``."""

    fragments: frozenset[int]
    sources: frozenset[str]


class DriftDetector:
    """Detector of a difference between this node's slow weights and its group's.

    ``me``: this node's peer id. ``model``: members with another one are not compared. ``most``: the largest group; among more
    members a round has several groups, whose weights differ by design.
    """

    def __init__(self, me: str, model: str, most: int) -> None:
        self._me, self._model, self._most = me, model, most
        self._own: OrderedDict[tuple[int, int], tuple[Sequence[float], float]] = OrderedDict()
        self._last: dict[int, Sequence[float]] = {}
        self._moves: dict[int, deque[float]] = {}
        self._doubts = 0
        self.newest: Sketch | None = None
        self.apart: frozenset[str] = frozenset()
        """The peers whose weights differ from this node's by the last call of ``split``, if it came to an end."""

    def finished(self, round: int, fragment: int, sketch: tuple[float, ...]) -> None:
        """Record the sketch of the slow weights of ``fragment`` after ``round``."""
        if any(real(number) is None for number in sketch):  # such a record could not be published, and equals nobody's
            self.moved()
            return
        if fragment in self._last:
            self._moves.setdefault(fragment, deque(maxlen=8)).append(distance(sketch, self._last[fragment]))
        self._last[fragment] = sketch
        moves = self._moves.get(fragment, ())
        least = PRECISION * max(abs(number) for number in sketch)
        self._own[round, fragment] = sketch, max(APART * median(moves), least) if moves else float("inf")
        while len(self._own) > REMEMBERED:
            self._own.popitem(last=False)
        self.newest = round, fragment, sketch

    def moved(self) -> None:
        """Forget the own sketches: the slow weights were replaced by others'."""
        self._own.clear()
        self._last.clear()
        self.newest, self._doubts = None, 0

    def split(
        self, members: Mapping[str, Member], group: Mapping[str, Sketch | None], partners: Collection[str]
    ) -> SplitDecision | None:
        """Return the decision to give way, or None, by the records of ``partners`` and by what this round's group has shown.

        Call it once a round. The group's are newer, and signed by who shows them, so nobody but their author can make them up.
        ``partners``: with which this node has exchanged; keys are free, so others' records would make any majority.
        """
        near, far, unknown, self.apart = {self._me}, set[str](), False, frozenset()
        fragments = set[int]()
        there = {
            p: m for p, m in members.items() if m.model == self._model and p in partners and m.state in ("waiting", "training")
        }
        # A record that still says "waiting" counts as one of whom nothing is known: quick rounds are over before the next one.
        others = {p: m.sketch if m.state == "training" else None for p, m in there.items() if p != self._me} | dict(group)
        if len(others) + 1 > self._most:
            return None
        for peer, shown in others.items():
            if shown is None or (known := self._own.get(shown[:2])) is None:
                unknown = True
                continue
            own, limit = known
            if distance(own, shown[2]) <= limit:
                near.add(peer)
            else:
                far.add(peer)
                fragments.add(shown[1])
        if not far or (len(near), -_order(near)) > (len(far), -_order(far)):
            self._doubts, self.apart = 0, frozenset(far)
            return None
        self._doubts += 1
        if unknown and self._doubts < DOUBTS:
            return None
        self._doubts, self.apart = 0, frozenset(far)
        return SplitDecision(frozenset(fragments), self.apart)


def _order(peers: set[str]) -> int:
    """Return the rank of the lowest peer id among all possible ones."""
    return int.from_bytes(min(peers).encode().ljust(64, b"\0"), "big")
