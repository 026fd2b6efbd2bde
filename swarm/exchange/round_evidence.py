"""What others' words say of the round in which a node should be: ``RoundEvidence``.

    evidence.heard(peer, round)
    evidence.furthest(peer, round, now)     # the round to which this node may move at most
    evidence.back(round)                    # the one to go back to if nobody else is in ``round``

A round is a number that any stranger can state, so a node follows the lower median of the peers
that it has met, within what its own clock makes plausible. Why: docs/internals.md, "The round of a
node".
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable
from statistics import median, median_high, median_low

from shoal.swarm.exchange.context import PeerContext
from shoal.swarm.p2p.newest import Newest

QUICKER = 256  # a large GPU against a small CPU
# rounds of every fragment without an exchange, and rounds ahead of the others, after which a node
# goes back
ALONE = 4
FEW = 3  # peers, of which one that lies cannot be a median
SHORTEST_S = 0.01  # of a round
MEASURED = 16  # rounds
REMEMBERED = 1024  # peers


class RoundEvidence:
    """What one node knows of others' rounds.

    ``fragments``: sent in turn, each with the next number. ``now``: the loop's time.
    """

    def __init__(self, context: PeerContext, fragments: int) -> None:
        self._context, self._fragments = context, fragments
        self._met: dict[str, int] = {}
        """Peers with which this node has exchanged -> the furthest round that they stated to it."""
        self._shared: dict[str, int] = {}
        """The round of the last exchange with each."""
        self._said = Newest[str, int](REMEMBERED)
        """Peers that it has not met -> the round that they stated to it last."""
        self._pushes: set[str] = set()
        """Those of them whose next word counts for more than the median."""
        self._behind = Newest[str, int](REMEMBERED)
        """Peers that called for an earlier round than this node is in, since its last exchange ->
        that round.
        """
        self._alone = 0
        self._began: tuple[float, int] | None = None
        """Time and number of the first round."""
        self._ahead = 0
        """Rounds by which it moved beyond its own pace since its last exchange."""
        self._begins: deque[float] = deque(maxlen=MEASURED)
        """Times of its newest rounds."""
        self._newest = 0
        """The number of the newest one."""

    @property
    def partners(self) -> frozenset[str]:
        """The peers with which this node has exchanged, for any thread: a record alone costs
        nothing, and counts for no weights.
        """
        return frozenset(dict(self._met))

    def knows(self, peer: str) -> bool:
        """Return whether this node has exchanged with ``peer``. For any thread."""
        return peer in self._met

    def begin(self, now: float, round: int) -> None:
        """Note that this node hands in its contribution to ``round``."""
        self._began = self._began or (now, round)
        if self._begins:
            self._ahead += max(round - self._newest - max(self._own(now)[1], 1), 0)
        self._newest = max(self._newest, round)
        self._begins.append(now)

    def _own(self, now: float) -> tuple[float, int]:
        """Return the seconds of this node's usual round, and how many of these went by since its
        newest began.
        """
        begins = list(self._begins)
        if len(begins) < 2:
            return math.inf, 0
        usual = max(
            median(later - earlier for earlier, later in itertools.pairwise(begins)),
            SHORTEST_S / self._fragments,
        )
        return usual, int((now - begins[-1]) / usual)

    def met(self, peers: Iterable[str], round: int) -> None:
        self._alone = self._ahead = 0
        self._behind.clear()
        for peer in peers:
            self._said.pop(peer, None)
            stated = self._met.pop(peer, 0)
            self._met[peer], self._shared[peer] = max(round, stated), round
            if stated < round + self._fragments:
                self._pushes.add(peer)
        while len(self._met) > REMEMBERED:
            oldest = next(iter(self._met))
            del self._met[oldest], self._shared[oldest]
            self._pushes.discard(oldest)

    def heard(self, peer: str, round: int) -> None:
        """Note that ``peer`` itself stated the ``round`` in which it is; this node's own word says
        nothing of others.
        """
        if peer == self._context.me:
            return
        if peer in self._met:
            self._met[peer] = max(round, self._met[peer])
        else:
            self._said[peer] = round

    def missed(self) -> None:
        self._alone += 1

    def called(self, peer: str, round: int) -> None:
        """Note that ``peer`` wants to meet this node in ``round``, which is over here."""
        self._behind[peer] = round

    def _others(self) -> dict[str, int]:
        me, model = self._context.me, self._context.model
        return {
            peer: one.round
            for peer, one in self._context.members().items()
            if peer != me and one.model == model
        }

    def furthest(self, peer: str, said: int, now: float) -> int:
        """Return the round to which this node may move at most, now that ``peer`` has ``said`` in
        which it is.
        """
        others = {other: max(at, self._met.get(other, 0)) for other, at in self._others().items()}
        met = [at for other, at in others.items() if other in self._met]
        words = met + [
            max(at, others[other]) for other, at in dict(self._said).items() if other in others
        ]
        began, first = self._began or (now, 0)
        usual_s, passed = self._own(now)
        possible = first + self._fragments * QUICKER * (
            1 + int((now - began) / usual_s / self._fragments)
        )
        usual = median_low(met if len(met) > 1 else words or [said])
        heard = others.keys() | dict(self._said).keys()  # also of those whose records are not here
        is_new = not self._met and math.isinf(usual_s)
        if len(words) < 2 and not (is_new and heard == {peer}):
            reach = self._newest + passed + max(ALONE * self._fragments - self._ahead, 0)
            usual = (
                usual if usual <= reach else self._newest
            )  # there it is met; half way there is nobody
        if said > usual and peer in self._pushes:
            self._pushes.discard(peer)
            half = median_high(met) if len(met) > FEW else usual
            return min(min(half, usual + self._fragments) + self._fragments, possible)
        # By a word beyond the others it moves to where they have been: a liar would send two of
        # them to each other's next rounds.
        return min(usual if said <= usual else max(usual - self._fragments, 0), possible)

    def back(self, round: int) -> int | None:
        """Return the round to go back to from ``round``, in which this node is alone; None if it is
        not.
        """
        rounds = self._alone // self._fragments
        if rounds < 1 or not self._behind:
            return None
        # Copies: the host's loop goes on meanwhile.
        behind = dict(self._behind)
        met = dict(self._met)
        others = self._others()
        last = self._shared if rounds < 2 * ALONE else {}
        callers = {peer: max(at, last.get(peer, 0)) for peer, at in behind.items() if peer in met}
        if not callers and (rounds >= 2 * ALONE or met.keys().isdisjoint(others)):
            callers = behind
        if not callers:
            return None
        distance = round - median_low(callers.values())
        patience = (
            2 * ALONE if distance <= ALONE * self._fragments else ALONE if len(others) > 1 else 1
        )
        if distance < self._fragments or rounds < patience:
            return None
        self._alone, self._ahead, self._began = 0, 0, None
        self._behind.clear()
        self._begins.clear()
        # What they stated is as old as this node's way here, but who stated more than that was no
        # guide.
        self._met = {peer: at if at > round else 0 for peer, at in met.items()}
        self._said.clear()
        self._newest = round - distance // self._fragments * self._fragments
        return self._newest
