"""Returning to the group's weights after a missed round, for methods in which all peers of a group hold the same slow weights.

DiLoCo and similar methods send displacements only, so a node that misses a round diverges and would never return by itself. It
fetches the slow weights of a member in the background and goes on training meanwhile. After one missed round its fast weights stay,
so what it learnt is in its next pseudo-gradient. After more, or if it trained in another part of a partitioned swarm
(below), they move with the slow ones: a pseudo-gradient over many rounds would pull the group back, and be
refused, and each outer step taken without a partner would be taken again. Of two that diverged, one keeps its own (`StateServer`).

Methods that send weights mix by themselves. But where distant weights are refused (``outer.suspect``) a node that is far behind
would be refused for good: once two peers in a row have done so it takes over a member's weights, as a newcomer does.


Detecting that parts of a group hold different slow weights, and deciding which part gives way.

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

import concurrent.futures
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from shoal.optim import OuterOptimizer, RoundInfo
from shoal.optim.outer.sketch import distance
from shoal.swarm.errors import NetworkError, ShoalError
from shoal.swarm.exchange.attempt import ExchangeStats
from shoal.swarm.membership.membership import MemberView
from shoal.swarm.state.catch_up import in_order, in_step
from shoal.swarm.state.server import StateServer
from shoal.swarm.state.snapshot import State
from shoal.swarm.state.sync import PATIENCE_S, StateQuery, begin_fetch
from shoal.swarm.wire.fields import Sketch, real
from shoal.swarm.wire.member import Member
from shoal.swarm.wire.state import StateRequest

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


ASKED = 4  # members that are asked in turn
SECOND_S = 1.0  # seconds that a second member may take to offer the same weights: each makes them older
PATIENCE = 5  # failed tries after which the user is warned
FAR = 2  # missed rounds of a fragment from which on the fast weights are replaced too
LONGEST = 16  # rounds between two tries, at most
SLOW_S = 5.0  # seconds from which on a fetch takes a link's place from exchanges; a quicker one in vain is tried again at once
TURNED_DOWN = 2  # peers in a row that refuse a node that comes from far behind: one may be hostile

log = logging.getLogger(__name__)


class Resynchronizer:
    """Observer of one node's rounds that fetches the group's weights when its own have diverged.

    Args:
        membership, model: the swarm, and the digest of the model's shapes.
        server: hands out this node's weights, and must know when they have diverged.
        stats: outcomes of this node's exchanges.
        moved: called when the slow weights were replaced by others'.
        clock: seconds; a simulation has its own.
        partners: peers with which this node has exchanged: they are asked first, for records alone are free.
    """

    def __init__(
        self,
        membership: MemberView,
        model: str,
        server: StateServer,
        opt: OuterOptimizer,
        stats: ExchangeStats | None = None,
        moved: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        partners: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._membership, self._model, self._server, self._opt = membership, model, server, opt
        self._partners = partners
        self._stats, self._moved, self._clock = stats or ExchangeStats(), moved, clock
        self._diverged: set[int] = set()
        """Fragments that have diverged."""
        self._missed: Counter[int] = Counter()
        """Rounds of a fragment that this node has missed since it was with its group."""
        self._late = 0
        """Rounds that this node's weights are behind its round, since it was with its group."""
        self._preferred: frozenset[str] = frozenset()
        """Peers to fetch from if any of them is there: those of the part that this node gives way to."""
        self._afresh = False
        """True if the state being fetched is to start from, as a newcomer does."""
        self._pending: concurrent.futures.Future[State | None] | None = None
        self._tries = 0
        self._began, self._began_s = 0, 0.0
        """The round and the time in which the last try began."""
        self._pause = self._next = 0
        """The rounds to wait after a slow try in vain, and the round of the next one."""

    @property
    def diverged(self) -> bool:
        """True while this node knows that its weights have diverged."""
        return bool(self._diverged)

    def joined(self, state: State) -> None:
        """Note that this node begins from ``state``. It never receives what was in flight at the source, so it must fetch again."""
        if self._opt.anchored:
            fragments = len(state.applied)
            self._diverged = {p for p, round in enumerate(state.applied) if round < state.round - fragments}

    def restarted(self) -> None:
        """Note that this node's weights were replaced on purpose: what is being fetched does not come into them."""
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        self._missed.clear()
        self._returned()

    def on_round(self, info: RoundInfo, *, behind: int, split: SplitDecision | None = None) -> None:
        """Handle the end of a round. ``behind``: its contribution counted so many rounds later than the node expected.

        ``split``: this node's part of the swarm gives way to another.
        """
        fragment = info.key.fragment
        if fragment >= self._opt.fragments:
            return
        together = len(info.members) >= 2
        if not self._opt.anchored:
            self._missed[fragment] = 0 if together else self._missed[fragment] + behind
            if self._missed[fragment] >= FAR and self._stats.turned_down() >= TURNED_DOWN and self._pending is None:
                self._afresh = True
                self._ask()
            return
        if behind:
            self._opt.applied[fragment] = self._opt.round - 1  # or earlier: then the weights must come from a later round
            self._missed[fragment] += max(behind // self._opt.fragments, 1)
            self._late += behind
        if not together:
            self._missed[fragment] += 1
        if behind or not together:
            self._diverged.add(fragment)
        elif fragment not in self._diverged:
            self._missed[fragment] = 0
        if split is not None and not self._diverged:  # otherwise it has missed a round, which explains that its weights differ
            self._diverged |= {p for p in split.fragments if p < self._opt.fragments}
            self._missed.update(dict.fromkeys(self._diverged, FAR))
            self._preferred = split.sources
        if self._diverged and self._pending is None and self._opt.round >= self._next:
            self._ask()

    def _ask(self) -> None:
        others = self._sources()
        self._began, self._began_s = self._opt.round, self._clock()
        # Of two that have diverged the one that is further keeps its weights: its swarm went on while the other was away.
        own = max(self._opt.round - self._late, 0)
        self._server.diverged = own if others and not self._afresh else None
        if not others:  # this node is the whole group
            self._returned()
            return
        request = StateRequest(swarm=self._membership.swarm, model=self._model, astray=not self._afresh, round=own)
        patience = PATIENCE_S if self._afresh else SECOND_S
        query = StateQuery(
            request,
            self._opt.shapes,
            self._opt.shared_shapes,
            equal=self._opt.anchored,
            confirmed=self._afresh,
            fragments=self._opt.fragments,
            patience=patience,
        )
        try:
            self._pending = begin_fetch(self._membership.host, query, others)
        except NetworkError as error:
            log.info("the weights of the swarm cannot be asked for: %s", error)

    def _sources(self) -> list[tuple[str, tuple[str, ...]]]:
        me = self._membership.identity.peer_id
        members = self._membership.directory.members().items()
        there = [m for peer, m in members if peer != me and m.model == self._model]
        preferred = [m for m in there if m.peer in self._preferred and m.state in ("waiting", "training")]  # a record may be late
        there = sorted(preferred or [m for m in there if m.state == "training"], key=lambda m: m.peer)
        first = in_order(there, self._membership.host.met, "", self._partners())
        return [(m.peer, m.addresses) for m in first[:ASKED]]

    def adopt_fetched(self) -> bool:
        """Take over weights that have arrived; call it between two steps. Return whether the node is with its group again."""
        if self._pending is None or not self._pending.done():
            return False
        fetched, self._pending = self._pending, None
        afresh, self._afresh = self._afresh, False
        try:
            state = fetched.result()
        except (ShoalError, concurrent.futures.CancelledError) as error:
            log.warning("the weights of the swarm were not taken over after a missed round: %s", error)
            self._back_off()
            return False
        if state is None:
            self._returned()  # nobody is nearer to the group than this node
            return False
        round = max(state.round, self._opt.round)
        if afresh:
            round = max(in_step(self._opt, state), self._opt.round)
            self._opt.adopt(state.slow, round=round, into_model=True, shared=state.extra, applied=state.applied)
            self._opt.listen()  # as a newcomer: the first round does not count
            self._returned()
            self._moved()
            return True
        far = [p for p in self._diverged if self._missed[p] >= FAR]
        taken = self._opt.adopt(state.slow, round=round, shared=state.extra, applied=state.applied, rebase=far)
        if taken:
            self._moved()
        self._diverged -= set(taken)
        # This node has missed again what the source had in flight and it has not.
        under_way = {p for p in taken if state.applied[p] < state.round - len(state.applied)}
        self._diverged |= {p for p in under_way if not any(round > state.applied[p] for round in self._opt.in_flight(p))}
        if not self._diverged:
            self._returned()
            return True
        self._back_off()
        self._tries += 1
        if self._tries == PATIENCE:
            log.warning(
                "rounds go by faster than the swarm's weights can be fetched, so this node's weights stay apart from the others': "
                "a longer round (--every) would help"
            )
        return False

    def _back_off(self) -> None:
        """Wait longer each time a slow fetch was in vain: on a slow link it takes the place of the exchanges that are due."""
        took = self._opt.round - self._began
        slow = self._clock() - self._began_s >= SLOW_S
        self._pause = min(max(2 * self._pause, took), LONGEST) if slow else 0
        self._next = self._opt.round + self._pause

    def _returned(self) -> None:
        self._pause = self._next = 0
        self._diverged.clear()
        self._preferred, self._afresh = frozenset(), False
        self._server.diverged, self._tries, self._late = None, 0, 0
