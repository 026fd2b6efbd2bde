"""Taking over the group's weights after a missed round, in the background of training.

Where all peers of a group hold the same slow weights (`Anchored` rules), only displacements are
sent, so a node that misses a round diverges and would never return by itself. It fetches the slow
weights of a member and goes on training meanwhile. After one missed round its fast weights stay, so
what it learnt is in its next pseudo-gradient. After more they move with the slow ones. Why, and
what happens where parts of a swarm differ: docs/internals.md, "Weights that diverged".
"""

from __future__ import annotations

import concurrent.futures
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace

from shoal.optim import OuterOptimizer, RoundInfo
from shoal.swarm.errors import NetworkError, ShoalError
from shoal.swarm.exchange.contribution import (
    ExchangeStats,
)
from shoal.swarm.membership.last_step import still_training
from shoal.swarm.membership.membership import Membership
from shoal.swarm.state.catch_up import in_order, in_step, query_for
from shoal.swarm.state.drift import SplitDecision
from shoal.swarm.state.query import PATIENCE_S
from shoal.swarm.state.snapshot import State
from shoal.swarm.state.state_server import StateServer
from shoal.swarm.state.sync import begin_fetch
from shoal.swarm.wire.messages import StateRequest

log = logging.getLogger(__name__)


MAX_SOURCES = 4  # members that are asked in turn
# That a second member may take to offer the same weights: each second makes them older.
CONFIRM_S = 1.0
WARN_AFTER_TRIES = 5  # in vain
# Missed rounds of a fragment from which on the fast weights are replaced too: a pseudo-gradient
# over many rounds would pull the group back, and be refused.
FAR_ROUNDS = 2
MAX_PAUSE_ROUNDS = 16  # between two tries
# From which on a fetch takes a link's place from exchanges; a quicker one in vain is tried again at
# once.
SLOW_FETCH_S = 5.0
# Peers in a row that refuse a node that comes from far behind: one may be hostile.
REFUSALS_BEFORE_RESTART = 2


class FetchBackoff:
    """The rounds to wait after slow fetches in vain, twice as many each time.

    On a slow link a fetch takes the place of the exchanges that are due.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.tries = 0  # that were taken over and still left the node behind
        self._clock = clock
        # The round and the time in which the last try began.
        self._began = 0
        self._began_at = 0.0
        self._pause = 0
        self._next = 0

    def is_due(self, round: int) -> bool:
        return round >= self._next

    def begin(self, round: int) -> None:
        self._began = round
        self._began_at = self._clock()

    def failed(self, round: int) -> None:
        """Note that the try was in vain, and ended in ``round``."""
        took = round - self._began
        self._pause = 2 * self._pause
        if self._clock() - self._began_at >= SLOW_FETCH_S:
            self._pause = min(max(self._pause, took), MAX_PAUSE_ROUNDS)
        else:
            self._pause = 0
        self._next = round + self._pause

    def reset(self) -> None:
        self.tries = 0
        self._pause = 0
        self._next = 0


class Resynchronizer:
    """Observer of one node's rounds that fetches the group's weights when its own have diverged.

    Args:
        membership, model: the swarm, and the digest of the model's shapes.
        server: hands out this node's weights, and must know when they have diverged.
        stats: outcomes of this node's exchanges.
        moved: called when the slow weights were replaced by others'.
        clock: seconds; a simulation has its own.
        partners: peers with which this node has exchanged: they are asked first, for records alone
            are free.
    """

    def __init__(
        self,
        membership: Membership,
        model: str,
        server: StateServer,
        opt: OuterOptimizer,
        stats: ExchangeStats | None = None,
        moved: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        partners: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._membership = membership
        self._model = model
        self._server = server
        self._opt = opt
        self._partners = partners
        self._stats = stats or ExchangeStats()
        self._moved = moved
        self._diverged: set[int] = set()  # fragments
        # Rounds of a fragment that this node has missed since it was with its group.
        self._missed: Counter[int] = Counter()
        # By fragment the last round that these weights hold.
        self._held: dict[int, int] = {}
        # Rounds that this node's weights are behind its round, since it was with its group.
        self._late = 0
        self._preferred: frozenset[str] = frozenset()
        """Peers to fetch from if any of them is there: those of the part that this node gives way
        to.
        """
        self._afresh = False  # whether what is fetched is to start from, as a newcomer does
        self._pending: concurrent.futures.Future[State | None] | None = None
        self._backoff = FetchBackoff(clock)

    @property
    def diverged(self) -> bool:
        return bool(self._diverged)

    def joined(self, state: State) -> None:
        """Note that this node begins from ``state``.

        It never receives what was in flight at the source, so it must fetch again.
        """
        if self._opt.anchored:
            fragments = len(state.applied)
            self._diverged = {
                p for p, round in enumerate(state.applied) if round < state.round - fragments
            }
            self._held = {p: round for p, round in enumerate(state.applied) if round >= 0}

    def restarted(self) -> None:
        """Note that this node's weights were replaced on purpose: what is being fetched does not
        come into them.
        """
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        self._missed.clear()
        self._held.clear()
        self._returned()

    def on_round(self, info: RoundInfo, *, behind: int, split: SplitDecision | None = None) -> None:
        """Handle the end of a round.

        ``behind``: its contribution counted so many rounds later than the node expected.

        ``split``: this node's part of the swarm gives way to another.
        """
        fragment = info.key.fragment
        if fragment >= self._opt.fragments:
            return
        together = len(info.members) >= 2
        if not self._opt.anchored:
            self._follow_refusals(fragment, behind, together)
            return
        missed = self._skipped(fragment, info.key.round) + int(not together)
        self._held[fragment] = info.key.round + behind
        if behind:
            # Or earlier: then the weights must come from a later round.
            self._opt.applied[fragment] = info.key.round + behind
            missed += max(behind // self._opt.fragments, 1)
            self._late += behind
        self._missed[fragment] += missed
        if missed:
            self._diverged.add(fragment)
        elif fragment not in self._diverged:
            self._missed[fragment] = 0
        # Otherwise it has missed a round, which explains that its weights differ.
        if split is not None and not self._diverged:
            self._give_way(split)
        if self._diverged and self._pending is None and self._backoff.is_due(self._opt.round):
            self._ask()

    def _skipped(self, fragment: int, round: int) -> int:
        """Return how many rounds of ``fragment`` lie between the last one that these weights hold
        and ``round``: weights that were taken over may be those of before a round that moved on
        without a result here.
        """
        fragments = self._opt.fragments
        held = self._held.get(fragment, round - fragments)
        return max((round - held) // fragments - 1, 0)

    def _follow_refusals(self, fragment: int, behind: int, together: bool) -> None:
        """Begin as a newcomer does once peers refuse a node that comes from far behind.

        Methods that send weights mix by themselves, but where distant weights are refused such a
        node would be refused for good. With a codec for pairs one that is far is met all the same.
        """
        refusals = self._stats.turned_down()
        if together and not refusals:
            self._missed[fragment] = 0
            return
        self._missed[fragment] += behind
        is_far = self._missed[fragment] >= FAR_ROUNDS
        if is_far and refusals >= REFUSALS_BEFORE_RESTART and self._pending is None:
            self._afresh = True
            self._ask()

    def _give_way(self, split: SplitDecision) -> None:
        """Note that the weights of this node's part are replaced by those of the larger one."""
        self._diverged |= {part for part in split.fragments if part < self._opt.fragments}
        self._missed.update(dict.fromkeys(self._diverged, FAR_ROUNDS))
        self._preferred = split.sources

    def _ask(self) -> None:
        others = self._sources()
        self._backoff.begin(self._opt.round)
        # Of two that have diverged the one that is further keeps its weights: its swarm went on
        # while the other was away.
        own = max(self._opt.round - self._late, 0)
        self._server.diverged = own if others and not self._afresh else None
        if not others:  # this node is the whole group
            self._returned()
            return
        request = StateRequest(
            swarm=self._membership.swarm, model=self._model, astray=not self._afresh, round=own
        )
        patience = PATIENCE_S if self._afresh else CONFIRM_S
        query = query_for(self._membership, self._model, self._opt)
        query = replace(query, request=request, confirmed=self._afresh, patience=patience)
        try:
            self._pending = begin_fetch(self._membership.host, query, others)
        except NetworkError as error:
            log.info("the weights of the swarm cannot be asked for: %s", error)

    def _sources(self) -> list[tuple[str, tuple[str, ...]]]:
        me = self._membership.identity.peer_id
        # Weights of those at their end belong to no round any more.
        training = still_training(self._membership.directory.members())
        there = [
            member
            for peer, member in training.items()
            if peer != me and member.model == self._model
        ]
        preferred = [m for m in there if m.peer in self._preferred]
        # A record may be late: one that "waits" may train already.
        able = [m for m in preferred if m.state in ("waiting", "training")]
        if not able:
            able = [m for m in there if m.state == "training"]
        partners = self._partners()
        # Whoever has averaged with this node could have moved its weights before.
        able = [m for m in able if m.peer in partners] or able
        there = sorted(able, key=lambda member: member.peer)
        first = in_order(there, self._membership.host.met, "", partners)
        return [(m.peer, m.addresses) for m in first[:MAX_SOURCES]]

    def adopt_fetched(self) -> bool:
        """Take over weights that have arrived; call it between two steps.

        Return whether the node is with its group again.
        """
        if self._pending is None or not self._pending.done():
            return False
        fetched = self._pending
        self._pending = None
        afresh = self._afresh
        self._afresh = False
        try:
            state = fetched.result()
        except (ShoalError, concurrent.futures.CancelledError) as error:
            log.warning(
                "the weights of the swarm were not taken over after a missed round: %s", error
            )
            self._back_off()
            return False
        except Exception as error:  # training goes on, and the weights are fetched again
            self._membership.host.internal_errors.caught("weights", error)
            self._back_off()
            return False
        if state is None:
            self._returned()  # nobody is nearer to the group than this node
            return False
        if afresh:
            self._start_from(state)
            return True
        self._rebase_on(state)
        if not self._diverged:
            self._returned()
            return True
        self._back_off()
        self._backoff.tries += 1
        if self._backoff.tries == WARN_AFTER_TRIES:
            log.warning(
                "rounds go by faster than the swarm's weights can be fetched, so this node's "
                "weights stay apart from the others': a longer round (--every) would help"
            )
        return False

    def _start_from(self, state: State) -> None:
        """Begin from ``state`` as a newcomer does: the first round does not count."""
        round = max(in_step(self._opt, state), self._opt.round)
        self._opt.adopt(
            state.slow, round=round, into_model=True, shared=state.extra, applied=state.applied
        )
        self._opt.listen()
        self._returned()
        self._moved()

    def _rebase_on(self, state: State) -> None:
        """Take over the slow weights of ``state``, and note which fragments still diverge."""
        far = [part for part in self._diverged if self._missed[part] >= FAR_ROUNDS]
        round = max(state.round, self._opt.round)
        taken = self._opt.adopt(
            state.slow, round=round, shared=state.extra, applied=state.applied, rebase=far
        )
        if taken:
            self._moved()
        self._diverged -= set(taken)
        # This node has missed again what the source had in flight and it has not.
        for part in taken:
            self._held[part] = state.applied[part]
            if not self._is_in(part, state.applied[part]):
                self._diverged.add(part)

    def _is_in(self, fragment: int, applied: int) -> bool:
        """Return whether this node takes part in the round that follows that of weights which are
        ``applied``.
        """
        later = [round for round in self._opt.in_flight(fragment) if round > applied]
        return not later or min(later) == applied + self._opt.fragments

    def _back_off(self) -> None:
        self._backoff.failed(self._opt.round)

    def _returned(self) -> None:
        """Note that this node is with its group again."""
        self._backoff.reset()
        self._diverged.clear()
        self._preferred = frozenset()
        self._afresh = False
        self._server.diverged = None
        self._late = 0
