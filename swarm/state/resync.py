"""Back to the group's weights after a missed round, for methods in which all peers of a group hold the same slow weights.

With DiLoCo and its kin only displacements are sent, so who misses a round drifts away and would never come back by itself. Such a
node takes over the slow weights of a member, in the background, and goes on training meanwhile. After one missed round its fast
weights stay, so what it learnt is in its next pseudo-gradient. After more, or if it went on in another part of a swarm that fell
apart (swarm/drift.py), they move with the slow ones: a pseudo-gradient over many rounds would pull the group back, and be refused,
and each outer step taken alone would be taken once more. If two have drifted from each other, one keeps its own (``StateServer``).

Methods that send weights mix by themselves. But where far ones are refused (``outer.suspect``) a node that comes back from far
behind would be refused for good: once two peers in a row have done so it takes over a member's weights, as a newcomer does.
"""

from __future__ import annotations

import concurrent.futures
import logging
from collections import Counter
from collections.abc import Callable

from shoal.optim import OuterOptimizer, RoundInfo
from shoal.swarm.errors import NetworkError, ShoalError
from shoal.swarm.exchange.stats import ExchangeStats
from shoal.swarm.membership.membership import Membership
from shoal.swarm.state.drift import SplitDecision
from shoal.swarm.state.server import StateServer
from shoal.swarm.state.snapshot import State
from shoal.swarm.state.sync import PATIENCE_S, StateQuery, begin_fetch
from shoal.swarm.wire.state import StateRequest

ASKED = 4  # members that are asked in turn
SECOND_S = 1.0  # seconds that a second member may take to state the same weights: each makes them older
PATIENCE = 5  # vain tries after which the user is told
FAR = 2  # missed rounds of a fragment from which on the fast weights do not stay
TURNED_DOWN = 2  # peers in a row that refuse a node which comes from far behind: one may be hostile

log = logging.getLogger(__name__)


class Resynchronizer:
    """Watches the rounds of one node.

    Args:
        membership, model: the swarm, and the digest of the model's shapes.
        server: hands out this node's weights, and must know when they have drifted.
        health: how its exchanges go.
        moved: called when the slow weights are others'.
    """

    def __init__(
        self,
        membership: Membership,
        model: str,
        server: StateServer,
        opt: OuterOptimizer,
        stats: ExchangeStats | None = None,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        self._membership, self._model, self._server, self._opt = membership, model, server, opt
        self._health, self._moved = stats or ExchangeStats(), moved
        self._astray: set[int] = set()
        """Fragments that have drifted."""
        self._missed: Counter[int] = Counter()
        """Rounds of a fragment that this node missed since it was with its group."""
        self._late = 0
        """Rounds that this node's weights are behind its round, since it was with its group."""
        self._givers_only: frozenset[str] = frozenset()
        self._afresh = False
        """What is coming is to start from, as a newcomer does."""
        self._coming: concurrent.futures.Future[State | None] | None = None
        self._tries = 0

    @property
    def astray(self) -> bool:
        """Whether this node knows that its weights have drifted."""
        return bool(self._astray)

    def joined(self, state: State) -> None:
        """This node begins from ``state``. What was in flight there it will never hear of, so it must look again."""
        if self._opt.anchored:
            fragments = len(state.applied)
            self._astray = {p for p, round in enumerate(state.applied) if round < state.round - fragments}

    def saw(self, info: RoundInfo, *, behind: int, split: SplitDecision | None = None) -> None:
        """A round is over. ``behind``: its contribution was counted so many rounds later than the node thought it was in.

        ``split``: this node's part of the swarm gives way to another.
        """
        fragment = info.key.fragment
        if fragment >= self._opt.fragments:
            return
        together = len(info.members) >= 2
        if not self._opt.anchored:
            self._missed[fragment] = 0 if together else self._missed[fragment] + behind
            if self._missed[fragment] >= FAR and self._health.turned_down() >= TURNED_DOWN and self._coming is None:
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
            self._astray.add(fragment)
        elif fragment not in self._astray:
            self._missed[fragment] = 0
        if split is not None and not self._astray:  # else it has missed a round: no wonder that its weights differ
            self._astray |= {p for p in split.fragments if p < self._opt.fragments}
            self._missed.update(dict.fromkeys(self._astray, FAR))
            self._givers_only = split.givers
        if self._astray and self._coming is None:
            self._ask()

    def _ask(self) -> None:
        others = self._givers()
        # Of two that have drifted the one that is further keeps its weights: its swarm went on while the other was away.
        own = max(self._opt.round - self._late, 0)
        self._server.astray = own if others and not self._afresh else None
        if not others:  # alone: what this node does is what the swarm does
            self._back()
            return
        shapes = [tuple(t.shape) for t in self._opt.slow]
        request = StateRequest(swarm=self._membership.swarm, model=self._model, astray=not self._afresh, round=own)
        patience = PATIENCE_S if self._afresh else SECOND_S
        wish = StateQuery(
            request, shapes, self._opt.shared_shapes, equal=self._opt.anchored, vouched=self._afresh, patience=patience
        )
        try:
            self._coming = begin_fetch(self._membership.host, wish, others)
        except NetworkError as error:
            log.info("the weights of the swarm cannot be asked for: %s", error)

    def _givers(self) -> list[tuple[str, tuple[str, ...]]]:
        me = self._membership.identity.peer_id
        members = self._membership.directory.members().items()
        there = [m for peer, m in members if peer != me and m.model == self._model and m.state == "training"]
        there = [m for m in there if m.peer in self._givers_only] or there
        return [(m.peer, m.addresses) for m in sorted(there, key=lambda m: (-m.round, m.peer))[:ASKED]]

    def settle(self) -> bool:
        """Between two steps: take over what has come. True if the node is with its group again."""
        if self._coming is None or not self._coming.done():
            return False
        coming, self._coming = self._coming, None
        afresh, self._afresh = self._afresh, False
        try:
            state = coming.result()
        except (ShoalError, concurrent.futures.CancelledError) as error:
            log.warning("the weights of the swarm were not taken over after a missed round: %s", error)
            return False
        if state is None or len(state.applied) != self._opt.fragments:
            self._back()  # nobody is nearer to the group than this node
            return False
        round = max(state.round, self._opt.round)
        if afresh:
            self._opt.adopt(state.slow, round=round, into_model=True, shared=state.extra, applied=state.applied)
            self._opt.listen()  # as a newcomer: the first round does not count
            self._back()
            self._moved()
            return True
        far = [p for p in self._astray if self._missed[p] >= FAR]
        taken = self._opt.adopt(state.slow, round=round, shared=state.extra, applied=state.applied, rebase=far)
        if taken:
            self._moved()
        self._astray -= set(taken)
        # What the giver had in flight and this node has not, it has missed again.
        under_way = {p for p in taken if state.applied[p] < state.round - len(state.applied)}
        self._astray |= {p for p in under_way if not any(round > state.applied[p] for round in self._opt.in_flight(p))}
        if not self._astray:
            self._back()
            return True
        self._tries += 1
        if self._tries == PATIENCE:
            log.warning(
                "rounds go by faster than the swarm's weights can be fetched, so this node's weights stay apart from the others': "
                "a longer round (--every) would help"
            )
        return False

    def _back(self) -> None:
        self._astray.clear()
        self._givers_only, self._afresh = frozenset(), False
        self._server.astray, self._tries, self._late = None, 0, 0
