"""Keeps an outer optimizer in step with its swarm: the round it is in, the weights it takes over,
and those it hands out.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from shoal.optim import FLOAT32, OuterOptimizer, RoundInfo
from shoal.swarm.exchange.pair.exchange import PairExchange
from shoal.swarm.exchange.robust import DistanceScreen
from shoal.swarm.membership.membership import Membership
from shoal.swarm.settings.outer import MAX_GROUP
from shoal.swarm.state.catch_up import in_step
from shoal.swarm.state.chunk_server import CHUNKS_PROTOCOL
from shoal.swarm.state.drift import DriftDetector
from shoal.swarm.state.resync import Resynchronizer
from shoal.swarm.state.snapshot import State
from shoal.swarm.state.state_server import StateServer
from shoal.swarm.training.diagnosis import Diagnosis
from shoal.swarm.wire.envelope import Sketch

if TYPE_CHECKING:
    from shoal.swarm.exchange.group.exchange import GroupExchange

log = logging.getLogger(__name__)

LEAST_SERVED_BYTES = 1 << 20
"""Bytes of weights that one peer is served in an hour at least: of a model of some hundred bytes
the messages around them are most.
"""


class OuterSync:
    """One optimizer's link to its swarm; hands out its slow weights from now on.

    All is for the thread that trains.

    Args:
        membership: this peer's place in the swarm.
        model: digest of the model's names and shapes.
        exchange: the optimizer's.
        screen: the screen by which that exchange refuses updates.
        clock: seconds; a simulation has its own.
    """

    def __init__(
        self,
        membership: Membership,
        model: str,
        opt: OuterOptimizer,
        exchange: PairExchange | GroupExchange,
        screen: DistanceScreen,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._opt = opt
        self._exchange = exchange
        self._screen = screen
        self._directory = membership.directory
        host = membership.host
        me = membership.identity.peer_id
        shapes = opt.shapes
        host.resource_manager.meter(
            CHUNKS_PROTOCOL,
            max(
                int(membership.network.models_per_hour * FLOAT32.nbytes(shapes)),
                LEAST_SERVED_BYTES,
            ),
        )
        self._server = StateServer(
            host, membership.swarm, model, shapes, clock, opt.parameters.names
        )
        self._resynchronizer = Resynchronizer(
            membership,
            model,
            self._server,
            opt,
            exchange.stats,
            self._took_over,
            clock,
            lambda: exchange.evidence.partners,
        )
        self._drift = DriftDetector(me, model, MAX_GROUP)
        self._restarts = opt.restarts
        self.diagnosis = Diagnosis(
            exchange.stats,
            membership.directory,
            me,
            clock,
            in_seconds=membership.manifest.outer.rounds_in_seconds,
            has_expired=membership.directory.access_policy.has_expired,
        )
        exchange.sketch = self.sketch

    def begin_from(self, state: State) -> None:
        """Take over the weights and the round of ``state``: of a swarm that is under way, or those
        that it begins with.
        """
        round = in_step(self._opt, state)
        self._opt.adopt(
            state.slow, round=round, into_model=True, shared=state.extra, applied=state.applied
        )
        if state.round > 0:
            # others' weights, not yet trained here: the first round has weight 0
            self._opt.listen()
        self._resynchronizer.joined(state)
        self._exchange.took_over(state.applied, newcomer=state.round > 0)
        self._server.keep(state)

    def begin(self) -> None:
        """Set the exchange to the round that the optimizer hands in next; before the first step,
        when all else is loaded.

        That is the oldest of the rounds in flight, if a checkpoint has any, for the first step
        begins them anew. Set to a later one, the exchange would send ahead a partner that calls for
        them before.
        """
        opt = self._opt
        begun_anew = itertools.chain.from_iterable(
            opt.in_flight(fragment) for fragment in range(opt.fragments)
        )
        self._exchange.next_round = min(begun_anew, default=opt.round)
        self._exchange.took_over(opt.applied_before(opt.round))

    def on_round(self, info: RoundInfo) -> None:
        """Follow a round that is over: the optimizer's ``on_round``."""
        opt = self._opt
        self._follow_restart()
        # A node that fell behind met the others in a later round than its own: go on from there.
        behind = self._exchange.behind(info.key, opt.round)
        opt.round = max(opt.round, self._exchange.next_round)
        self._exchange.next_round = opt.round
        ahead_of = self._exchange.back(opt.round)
        if ahead_of is not None:
            log.warning(
                "no other peer is near round %d: this node goes back to round %d, where the others "
                "are",
                opt.round // opt.fragments,
                ahead_of // opt.fragments,
            )
            opt.go_back(ahead_of)
            self._drift.moved()
        fragment = info.key.fragment
        is_compared = opt.anchored and fragment < opt.fragments
        if behind:  # the contribution was counted in another round than its own
            self._drift.moved()
        elif is_compared:
            self._drift.finished(info.key.round, fragment, opt.sketch_of(fragment))
        split = None
        # A node that knows that its weights have diverged, or that was alone just now, knows why
        # they differ.
        explained = behind or len(info.members) < 2 or self._resynchronizer.diverged
        if is_compared and not explained:
            members = self._directory.members()
            partners = self._exchange.evidence.partners
            split = self._drift.split(members, self._exchange.sketches, partners)
            self.diagnosis.apart(self._drift.apart, members, split is not None)
        self._resynchronizer.on_round(info, behind=behind, split=split)

    def after_step(self) -> bool:
        self._follow_restart()
        back = self._resynchronizer.adopt_fetched()
        if back:
            self._exchange.next_round = self._opt.round
        self.offer()
        return back

    def _follow_restart(self) -> None:
        """Forget what is known of the weights before, if others were loaded on purpose: no fetched
        ones must replace these.
        """
        if self._opt.restarts != self._restarts:
            self._restarts = self._opt.restarts
            self._resynchronizer.restarted()
            self._took_over()

    def offer(self) -> None:
        self._server.offer(self._state)

    def at_rest(self) -> AbstractContextManager[None]:
        """Return a block in which the slow weights do not change: peers that ask for them need not
        wait for its end.
        """
        return self._server.at_rest(self._state)

    def _state(self) -> State:
        opt = self._opt
        slow = opt.slow
        shared = opt.shared
        # Later ones may end after it went back.
        applied = opt.applied_before(opt.round + 1)
        return State(opt.round, slow, shared, applied, gathers=getattr(opt, "gathers", 0))

    def sketch(self) -> Sketch | None:
        """Return the newest sketch of the slow weights that others may compare theirs with."""
        # No peer should give way to diverged weights.
        return None if self._resynchronizer.diverged else self._drift.newest

    def _took_over(self) -> None:
        self._drift.moved()
        self._exchange.took_over(self._opt.applied_before(self._opt.round))
        if not self._opt.anchored:  # it was refused for being far away, and is no longer
            self._screen.forget()
