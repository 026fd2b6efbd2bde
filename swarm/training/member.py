"""One training peer's duties towards its swarm, the same for ``shoal up``, loops of one's own and
simulated peers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from shoal.optim import OuterOptimizer, RoundInfo
from shoal.swarm.exchange.pair.exchange import PairExchange
from shoal.swarm.exchange.robust import DistanceScreen
from shoal.swarm.membership.membership import SHOAL_VERSION, Membership
from shoal.swarm.p2p.addresses import range_met
from shoal.swarm.state.snapshot import State
from shoal.swarm.topics.status import StatusReporter
from shoal.swarm.training.group_speeds import GroupSpeeds, group_speeds
from shoal.swarm.training.lag_report import LagReport
from shoal.swarm.training.last_average import EndReport
from shoal.swarm.training.notice import Notice
from shoal.swarm.training.outer_sync import OuterSync
from shoal.swarm.training.record_keeper import RecordKeeper, RoundReport
from shoal.swarm.training.round_totals import RoundTotals
from shoal.swarm.training.shard import Shard
from shoal.swarm.wire.envelope import MAX_BYTES, real, share
from shoal.swarm.wire.messages import Member
from shoal.swarm.wire.record import MAX_PARTNERS, TAIL, NodeRecord, Round
from shoal.swarm.wire.record import State as DirectoryState

if TYPE_CHECKING:
    from shoal.swarm.exchange.group.exchange import GroupExchange

LEAVE_S = 2.0
"""To tell the swarm that this node leaves."""


def member_fields(record: NodeRecord) -> dict[str, Any]:
    """Return the fields of `Member` that ``record`` has.

    Those of the link are left out: `OwnRecord` has them as of the moment when it is published.
    """
    found = {**dict(record.progress), **dict(record.exchanges), **dict(record.faults)}
    shared = {name: value for name, value in found.items() if name in Member.model_fields}
    if record.rollouts is not None and record.rollouts.unused:
        (reason, _), *_ = record.rollouts.unused
        shared["unused"] = share(record.rollouts.unused_share), reason
    return {**shared, "loss": record.loss.training}


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
        speeds = self._speeds if membership.manifest.outer.row.group == "everyone" else None
        self.lag_report = LagReport(opt, membership.host.traffic.rate, clock, speeds)
        self.records = RecordKeeper(membership, opt, self.lag_report)
        """Counts what this node's record states."""
        self._end: EndReport | None = None
        self.reporter: StatusReporter | None = None
        """Sends this node's status to those who watch the swarm, once it is set."""
        self._sync: OuterSync | None = None
        self._totals = RoundTotals()

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
        notices = [*self.sync.diagnosis.news(), *self.lag_report.news()]
        line = self._membership.news()
        if line:
            notices.append(Notice("membership", line))
        return notices

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
        self._totals.tokens(self._opt.tokens)  # those of a resumed run are in earlier rounds
        if state is not None:
            self.sync.begin_from(state)
        self.sync.begin()

    def fields(self, record: NodeRecord) -> dict[str, Any]:
        """Return the fields of this peer's `Member`, made of ``record``, but for who and where it
        is.
        """
        fields = {
            **member_fields(record),
            "name": self._name,
            "shard": self.shard.index,
            "shards": self.shard.of,
            "model": self._model,
            "version": SHOAL_VERSION,
            "sketch": None if self._sync is None else self._sync.sketch(),
        }
        if self._end is not None:
            fields["end"] = self._end.record(self._name)
            # A message has no room for all.
            fields |= {"sketch": None, "missing_names": ()}
        return fields

    def announce(self, state: DirectoryState) -> NodeRecord:
        """Publish this node's record, to those who watch and in the directory, and return it.

        Returns at once.
        """
        self.records.state = state
        record = self.record()
        if self.reporter is not None:
            self.reporter.progress(record)
        self._membership.directory.announce(**self.fields(record))
        return record

    def record(self) -> NodeRecord:
        """Return this node's record as of now."""
        return self.records.record(None if self._sync is None else self._sync.diagnosis)

    def start_counting(self) -> None:
        """Leave the bytes sent and received up to now out of the first round."""
        traffic = self._membership.host.traffic
        self._totals.sent(traffic.sent)
        self._totals.received(traffic.received)

    def on_round(self, info: RoundInfo, wait_s: float | None = None) -> RoundReport:
        """Follow a round that is over: the optimizer's ``on_round``.

        ``wait_s`` None: the wait that the exchange measured.
        """
        self.sync.on_round(info)
        self._screen.newcomers.see(self._membership.directory.members())
        measured_s = self._totals.waited(self.exchange.waited)
        if wait_s is None:
            wait_s = measured_s
        traffic = self._membership.host.traffic
        sent = self._totals.sent(traffic.sent)
        received = self._totals.received(traffic.received)
        diagnosis = self.sync.diagnosis
        rejections = self._screen.rejections()
        alone = self._membership.manifest.outer.alone
        why = "" if alone else diagnosis.met(info, self._model, self._opt.fragments)
        report = RoundReport(
            sent,
            received,
            wait_s,
            rejections,
            why,
            diagnosis.own_error(info),
        )
        diagnosis.waited(wait_s)
        diagnosis.rejected(rejections)
        self.lag_report.on_round(info, wait_s, report.sent)
        self.records.round(info, report)
        return report

    def _range(self, peer: str) -> str:
        member = self._membership.directory.members().get(peer)
        addresses = member.addresses if member is not None else ()
        return range_met(peer, addresses, self._membership.host.met)

    def _speeds(self, group: Collection[str]) -> GroupSpeeds | None:
        members = self._membership.directory.members()
        return group_speeds(members, group, self._membership.identity.peer_id)

    def report_round(self, info: RoundInfo, report: RoundReport, loss: float | None) -> Round:
        """Send what a round came to, to those who watch, and return it. ``loss``: this node's
        training loss, nats.
        """
        tokens = max(self._totals.tokens(self._opt.tokens), 0)
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
        if self.reporter is not None:
            projection = self._opt.projection_of(info.key.fragment)
            self.reporter.round(done, self.record(), partners, tokens, projection)
        return done

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

    def end(self) -> None:
        """Tell the swarm at once that this node's last step is done: it is in no more rounds, and
        averages once more.
        """
        self.exchange.end()
        self.records.finished = True
        self.announce("training")
        self._membership.directory.renew()

    def leave(self, end: EndReport | None = None) -> None:
        """Announce that this node leaves, so that nobody waits for it; without an answer its record
        expires.

        ``end``: what the last average came to, for others to see.
        """
        self._end = end
        self.announce("leaving")
        self._membership.directory.leave(LEAVE_S)
