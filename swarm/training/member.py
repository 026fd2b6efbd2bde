"""One training peer's duties towards its swarm, the same for ``shoal up``, loops of one's own and
simulated peers.

Keep an outer optimizer in step with its swarm: the round it is in, the weights it takes over, and
those it hands out.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from shoal.optim import FLOAT32, OuterOptimizer, RoundInfo
from shoal.swarm.exchange.pair.exchange import PairExchange
from shoal.swarm.exchange.robust import DistanceScreen
from shoal.swarm.membership.membership import SHOAL_VERSION, Membership
from shoal.swarm.p2p.addresses import range_met
from shoal.swarm.settings.outer import MAX_GROUP
from shoal.swarm.state.catch_up import in_step
from shoal.swarm.state.chunk_server import CHUNKS_PROTOCOL
from shoal.swarm.state.drift import DriftDetector
from shoal.swarm.state.resync import Resynchronizer
from shoal.swarm.state.snapshot import State
from shoal.swarm.state.state_server import StateServer
from shoal.swarm.topics.status import StatusReporter
from shoal.swarm.training.diagnosis import Diagnosis, LagReport, Notice
from shoal.swarm.training.factories import Rates
from shoal.swarm.training.last_average import EndReport
from shoal.swarm.training.record_keeper import RecordKeeper, RoundReport
from shoal.swarm.training.shard import Shard
from shoal.swarm.wire.envelope import MAX_BYTES, Sketch, rate, real, share
from shoal.swarm.wire.record import MAX_PARTNERS, TAIL, NodeRecord, Round
from shoal.swarm.wire.record import State as DirectoryState

if TYPE_CHECKING:
    from shoal.swarm.exchange.group.exchange import GroupExchange

log = logging.getLogger(__name__)


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
            max(int(membership.network.models_per_hour * FLOAT32.nbytes(shapes)), 1),
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
            self._sketch,
            clock,
            in_seconds=membership.manifest.outer.round.startswith("seconds"),
        )
        exchange.sketch = self._sketch

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

    def on_round(self, info: RoundInfo) -> None:
        """Follow a round that is over: the optimizer's ``on_round``."""
        opt = self._opt
        self._follow_restart()
        # A node that fell behind met the others in a later round than its own: go on from there.
        behind = max(self._exchange.next_round - opt.round, 0)
        opt.round = max(opt.round, self._exchange.next_round)
        self._exchange.next_round = opt.round
        if (ahead_of := self._exchange.back(opt.round)) is not None:
            log.warning(
                "no other peer is near round %d: this node goes back to round %d, where the others "
                "are",
                opt.round,
                ahead_of,
            )
            opt.go_back(ahead_of)
            self._drift.moved()
        if behind:  # the contribution was counted in another round than its own
            self._drift.moved()
        elif opt.anchored and info.key.fragment < opt.fragments:
            self._drift.finished(
                info.key.round, info.key.fragment, opt.sketch_of(info.key.fragment)
            )
        split = None
        # A node that knows that its weights have diverged, or that was alone just now, knows why
        # they differ.
        explained = behind or len(info.members) < 2 or self._resynchronizer.diverged
        if opt.anchored and info.key.fragment < opt.fragments and not explained:
            members = self._directory.members()
            split = self._drift.split(
                members, self._exchange.sketches, self._exchange.evidence.partners
            )
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
        applied = [
            min(applied, opt.round) for applied in opt.applied
        ]  # later ones may end after it went back
        return State(opt.round, slow, shared, applied, gathers=getattr(opt, "gathers", 0))

    def _sketch(self) -> Sketch | None:
        return (
            None if self._resynchronizer.diverged else self._drift.newest
        )  # no peer should give way to diverged weights

    def _took_over(self) -> None:
        self._drift.moved()
        if not self._opt.anchored:  # it was refused for being far away, and is no longer
            self._screen.forget()


LEAVE_S = 2.0  # seconds to tell the swarm that this node leaves
STANDING = Rates()


class TrainingMember:
    """A peer that trains in a swarm: announces itself, follows the rounds, hands out weights, and
    counts what a round costs.

    All methods are for the thread that trains. Nothing is served or announced before ``serve`` or
    ``announce``.

    Args:
        membership: this peer's place in the swarm.
        opt, exchange, screen: the outer optimizer, its exchange, and the screen that refuses
            others' updates.
        model: digest of the model's names and shapes.
        name: of this node, for people.
        clock: seconds; a simulation has its own.
    """

    def __init__(
        self,
        membership: Membership,
        opt: OuterOptimizer,
        exchange: PairExchange | GroupExchange,
        screen: DistanceScreen,
        *,
        model: str,
        name: str,
        shard: Shard,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._membership = membership
        self._opt = opt
        self._screen = screen
        self._clock = clock
        screen.newcomers.where = self._range
        self._name = name
        self._model = model
        self.shard = shard
        self.exchange = exchange
        self.lag_report = LagReport(opt, membership.host.traffic.rate, clock)
        self.records = RecordKeeper(membership, opt, self.lag_report)
        """Counts what this node's record states."""
        self._end: EndReport | None = None
        self.reporter: StatusReporter | None = None
        """Sends this node's status to those who watch the swarm, once it is set."""
        self._sync: OuterSync | None = None
        self._sent = self._received = self._tokens = 0
        self._waited = 0.0

    @property
    def sync(self) -> OuterSync:
        """The optimizer's link to the swarm; only after ``serve``."""
        assert self._sync is not None
        return self._sync

    def news(self) -> list[Notice]:
        """Return the sentences for this node's user that were not returned yet; touches no
        network.
        """
        self.sync.diagnosis.refused(self._membership.refused())
        own = [Notice("membership", line) for line in (self._membership.news(),) if line]
        return [*self.sync.diagnosis.news(), *self.lag_report.news(), *own]

    def serve(self) -> None:
        self._sync = OuterSync(
            self._membership, self._model, self._opt, self.exchange, self._screen, self._clock
        )

    def begin(self, state: State | None = None) -> None:
        """Start from ``state``, the swarm's weights, or from what the optimizer holds; before the
        first step.
        """
        if self._sync is None:
            self.serve()
        self._tokens = self._opt.tokens  # those of a resumed run are in earlier rounds
        if state is not None:
            self.sync.begin_from(state)
        self.sync.begin()

    def fields(
        self, state: DirectoryState, loss: float | None, steps_per_s: float
    ) -> dict[str, Any]:
        """Return the fields of this peer's ``Member`` record, but for who it is and where."""
        return {
            "name": self._name,
            "round": self._opt.round,
            "step": self._opt.steps,
            "loss": real(loss),
            "steps_per_s": rate(steps_per_s),
            "shard": self.shard.index,
            "shards": self.shard.of,
            "model": self._model,
            "state": state,
            "version": SHOAL_VERSION,
            "ended": self.records.finished,
            "end": None if self._end is None else self._end.record(self._name),
        }

    def announce(
        self, state: DirectoryState, loss: float | None = None, rates: Rates = STANDING
    ) -> None:
        """Publish where training is and how fast: to those who watch, and in the directory.

        Returns at once.
        """
        self.records.state = state
        self.records.rates = rates
        self.records.lost(training=loss)
        fields = self.fields(state, loss, rates.steps_per_s)
        speed = {
            "tokens_per_s": rate(rates.tokens_per_s),
            "mfu": share(rates.mfu),
            **self.lag_report.details(),
        }
        if self.reporter is not None:
            self.reporter.progress(self.record())
        details = {} if self._sync is None else self._sync.diagnosis.details()
        if self._end is not None:
            details |= {"sketch": None, "missing_names": ()}  # a record has no room for all
        self._membership.directory.announce(**fields, **details, **speed)

    def record(self) -> NodeRecord:
        """Return this node's record as of now, with what was announced last."""
        return self.records.record(None if self._sync is None else self._sync.diagnosis)

    def start_counting(self) -> None:
        """Leave the bytes sent and received up to now out of the first round."""
        traffic = self._membership.host.traffic
        self._sent = traffic.sent
        self._received = traffic.received

    def on_round(self, info: RoundInfo, wait_s: float | None = None) -> RoundReport:
        """Follow a round that is over: the optimizer's ``on_round``.

        ``wait_s`` None: the wait that the exchange measured.
        """
        self.sync.on_round(info)
        self._screen.newcomers.see(self._membership.directory.members())
        traffic = self._membership.host.traffic
        waited = self.exchange.waited
        wait_s = waited - self._waited if wait_s is None else wait_s
        diagnosis, rejections = self.sync.diagnosis, self._screen.rejections()
        # By its key: of several fragments in flight one may begin before another is over.
        odd = len(info.members) < 2 and self.exchange.stats.of(info.key).left_out
        why = diagnosis.met(info, self._model, self._opt.fragments, odd=odd)
        report = RoundReport(
            traffic.sent - self._sent,
            traffic.received - self._received,
            wait_s,
            rejections,
            odd,
            why,
            diagnosis.own_error(info),
        )
        self._sent = traffic.sent
        self._received = traffic.received
        self._waited = waited
        diagnosis.waited(wait_s)
        diagnosis.rejected(rejections)
        self.lag_report.on_round(info, wait_s, report.sent)
        self.records.round(info, report)
        return report

    def _range(self, peer: str) -> str:
        member = self._membership.directory.members().get(peer)
        return range_met(
            peer, member.addresses if member is not None else (), self._membership.host.met
        )

    def report_round(self, info: RoundInfo, report: RoundReport, loss: float | None) -> None:
        """Send what a round came to, to those who watch. ``loss``: this node's training loss,
        nats.
        """
        tokens, self._tokens = self._opt.tokens - self._tokens, self._opt.tokens
        if self.reporter is None:
            return
        me = self._membership.identity.peer_id
        partners = [peer for peer in info.members if peer != me]
        done = Round(
            round=info.key.round,
            step=info.step,
            members=max(len(info.members), 1),
            partners=tuple(peer[-TAIL:] for peer in partners[:MAX_PARTNERS]),
            bytes_sent=min(report.sent, MAX_BYTES),
            bytes_received=min(report.received, MAX_BYTES),
            wait_s=max(report.wait_s, 0.0),
            loss=real(loss),
        )
        projection = self._opt.projection_of(info.key.fragment)
        self.reporter.round(done, self.record(), partners, max(tokens, 0), projection)

    def trained_alone(self) -> str:
        """Return a sentence if nothing was ever exchanged though others were there, else
        nothing.
        """
        return self.sync.diagnosis.trained_alone(self._opt.fragments)

    def after_step(self) -> bool:
        """Do what is due between two steps.

        True if the swarm's weights were taken over just now, after a missed round.
        """
        return self.sync.after_step()

    def at_rest(self) -> AbstractContextManager[None]:
        """Return a block in which the slow weights do not change (`OuterSync.at_rest`); only after
        ``serve``.
        """
        return self.sync.at_rest()

    def end(self, loss: float | None = None, rates: Rates = STANDING) -> None:
        """Tell the swarm at once that this node's last step is done: it is in no more rounds, and
        averages once more.
        """
        self.records.finished = True
        self.announce("training", loss, rates)
        self._membership.directory.renew()

    def leave(
        self,
        loss: float | None = None,
        rates: Rates = STANDING,
        end: EndReport | None = None,
    ) -> None:
        """Announce that this node leaves, so that nobody waits for it; without an answer its record
        expires.

        ``end``: what the last average came to, for others to see.
        """
        self._end = end
        self.announce("leaving", loss, rates)
        self._membership.directory.leave(LEAVE_S)
