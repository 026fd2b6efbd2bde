"""Back to the group's weights after a missed round, for methods in which all peers of a group hold the same slow weights.

With DiLoCo and its kin only displacements are sent, so who misses a round drifts away and would never come back by itself. Such a
node takes over the slow weights of a member, in the background, and goes on training meanwhile: its fast weights stay, so what it
learnt is in its next pseudo-gradient. If two have drifted from each other, one of them keeps its own (``StateServer``).
"""

from __future__ import annotations

import concurrent.futures
import logging

from node.membership import Membership
from optim import OuterOptimizer, RoundInfo
from swarm.errors import NetworkError, ShoalError
from swarm.messages import StateRequest
from swarm.newcomer import Wish, begin_fetch
from swarm.snapshot import State
from swarm.state_server import StateServer

ASKED = 4  # members that are asked in turn
SECOND_S = 1.0  # seconds that a second member may take to state the same weights: each makes them older
PATIENCE = 5  # vain tries after which the user is told

log = logging.getLogger(__name__)


class Anchor:
    """Watches the rounds of one node.

    Args:
        membership, model: the swarm, and the digest of the model's shapes.
        server: hands out this node's weights, and must know when they have drifted.
    """

    def __init__(self, membership: Membership, model: str, server: StateServer, opt: OuterOptimizer) -> None:
        self._membership, self._model, self._server, self._opt = membership, model, server, opt
        self._astray: set[int] = set()
        """Fragments that have drifted."""
        self._coming: concurrent.futures.Future[State | None] | None = None
        self._tries = 0

    def joined(self, state: State) -> None:
        """This node begins from ``state``. What was in flight there it will never hear of, so it must look again."""
        if self._opt.anchored:
            fragments = len(state.applied)
            self._astray = {p for p, round in enumerate(state.applied) if round < state.round - fragments}

    def saw(self, info: RoundInfo, *, moved: bool) -> None:
        """A round is over. ``moved``: its contribution was counted in a later round than the node thought it was in."""
        fragment = info.key.fragment
        if not self._opt.anchored or fragment >= self._opt.fragments:
            return
        if moved:
            self._opt.applied[fragment] = self._opt.round - 1  # or earlier: then the weights must come from a later round
        if moved or len(info.members) < 2:
            self._astray.add(fragment)
        if self._astray and self._coming is None:
            self._ask()

    def _ask(self) -> None:
        others = self._givers()
        self._server.astray = bool(others)
        if not others:  # alone: what this node does is what the swarm does
            self._astray.clear()
            return
        shapes = [tuple(t.shape) for t in self._opt.slow]
        request = StateRequest(swarm=self._membership.swarm, model=self._model, astray=True)
        wish = Wish(request, shapes, self._opt.shared_shapes, equal=True, vouched=False, patience=SECOND_S)
        try:
            self._coming = begin_fetch(self._membership.host, wish, others)
        except NetworkError as error:
            log.info("the weights of the swarm cannot be asked for: %s", error)

    def _givers(self) -> list[tuple[str, tuple[str, ...]]]:
        me = self._membership.identity.peer_id
        members = self._membership.directory.members().items()
        there = [m for peer, m in members if peer != me and m.model == self._model and m.state == "training"]
        return [(m.peer, m.addresses) for m in sorted(there, key=lambda m: (-m.round, m.peer))[:ASKED]]

    def settle(self) -> bool:
        """Between two steps: take over what has come. True if the node is with its group again."""
        if self._coming is None or not self._coming.done():
            return False
        coming, self._coming = self._coming, None
        try:
            state = coming.result()
        except (ShoalError, concurrent.futures.CancelledError) as error:
            log.warning("the weights of the swarm were not taken over after a missed round: %s", error)
            return False
        if state is None or len(state.applied) != self._opt.fragments:
            self._back()  # nobody is nearer to the group than this node
            return False
        taken = self._opt.adopt(
            state.slow, round=max(state.round, self._opt.round), shared=state.extra, applied=state.applied
        )
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
        self._server.astray, self._tries = False, 0
