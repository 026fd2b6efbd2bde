"""Whether the slow weights of a group are still the same everywhere, and who gives way if two parts of it went on apart.

For methods whose peers all hold the same slow weights (``Anchored`` rules). Each says in its record to what its slow weights come
after its newest round (optim/sketch.py); each compares that with its own after that round. When a network was in two parts, both
in the same rounds, nothing else would ever show that their weights differ. The rule:

* Who is behind in rounds moves to the round of the others and takes over their weights, as any peer that was late does.
* In the same round the smaller part takes over the weights of the larger one. Of two equal ones, that in which no peer has the
  lowest peer id. What the part that gives way has learnt since the split is lost but for the steps of the round it is in; its data,
  inner optimizers and steps go on.

"Smaller" is by what a node sees itself: those that hold what it holds, against all others. If none is a majority all give way but
for the lowest peer id among those of the latest round that ask each other (``StateServer``), so one set of weights is left.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from shoal.optim.outer.sketch import distance
from shoal.swarm.wire.member import Member

REMEMBERED = 64  # own rounds to compare others' records with, which are some seconds old
APART = 0.25
"""Of the distance that a round usually moves the weights: one missed round makes about 1, different rounding 1e-4 and then more."""
PRECISION = 1e-5  # of the sketch: below it weights that hardly move any more differ by rounding alone
DOUBTS = 3  # rounds in a row that a node must find itself in the smaller part while it cannot tell of everybody


@dataclass(frozen=True)
class SplitDecision:
    """This node should take over the weights of one of ``givers``, in ``fragments``."""

    fragments: frozenset[int]
    givers: frozenset[str]


class DriftDetector:
    """One node's. ``me``: its peer id; ``model``: members with another one are not compared; ``most``: as many can be in one group.

    Among more the rounds' groups are several, whose weights differ by design.
    """

    def __init__(self, me: str, model: str, most: int) -> None:
        self._me, self._model, self._most = me, model, most
        self._own: OrderedDict[tuple[int, int], tuple[Sequence[float], float]] = OrderedDict()
        self._last: dict[int, Sequence[float]] = {}
        self._moves: dict[int, deque[float]] = {}
        self._doubts = 0
        self.newest: tuple[int, int, tuple[float, ...]] | None = None

    def finished(self, round: int, fragment: int, sketch: tuple[float, ...]) -> None:
        """What the slow weights of ``fragment`` come to after ``round``."""
        if not all(map(math.isfinite, sketch)):  # such a record could not be published, and equals nobody's
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
        """The slow weights are others' now: what was known of the own ones is of no use."""
        self._own.clear()
        self._last.clear()
        self.newest, self._doubts = None, 0

    def split(self, members: Mapping[str, Member]) -> SplitDecision | None:
        """Whether this node should give way, by the newest records; to be asked once a round."""
        near, far, unknown = {self._me}, set[str](), False
        fragments = set[int]()
        others = {p: m for p, m in members.items() if p != self._me and m.model == self._model and m.state == "training"}
        if len(others) + 1 > self._most:
            return None
        for peer, member in others.items():
            if member.sketch is None or (known := self._own.get(member.sketch[:2])) is None:
                unknown = True
                continue
            own, apart = known
            if distance(own, member.sketch[2]) <= apart:
                near.add(peer)
            else:
                far.add(peer)
                fragments.add(member.sketch[1])
        if not far or (len(near), -_order(near)) > (len(far), -_order(far)):
            self._doubts = 0
            return None
        self._doubts += 1
        if unknown and self._doubts < DOUBTS:
            return None
        self._doubts = 0
        return SplitDecision(frozenset(fragments), frozenset(far))


def _order(peers: set[str]) -> int:
    """The place of the lowest peer id among all there could be."""
    return int.from_bytes(min(peers).encode().ljust(64, b"\0"), "big")
