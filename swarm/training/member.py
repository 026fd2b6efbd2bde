"""One training peer's duties towards its swarm, the same for ``shoal up``, loops of one's own and simulated peers."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.optim import OuterOptimizer, RoundInfo
from shoal.swarm.exchange.pair.exchange import PairExchange
from shoal.swarm.exchange.robust import DistanceScreen, RejectedUpdate
from shoal.swarm.membership.directory import Directory
from shoal.swarm.membership.directory import State as DirectoryState
from shoal.swarm.membership.membership import SHOAL_VERSION
from shoal.swarm.membership.view import MemberView
from shoal.swarm.p2p.multiaddr import host_of, range_of
from shoal.swarm.p2p.stream import short
from shoal.swarm.state.snapshot import State
from shoal.swarm.topics.status_reporter import StatusReporter
from shoal.swarm.training.lag_report import LagReport
from shoal.swarm.training.outer_sync import OuterSync
from shoal.swarm.training.self_report import SelfReport
from shoal.swarm.training.shard import Shard
from shoal.swarm.wire.fields import Failure, rate, real, share

if TYPE_CHECKING:
    from shoal.swarm.exchange.group.exchange import GroupExchange

LEAVE_S = 2.0  # seconds to tell the swarm that this node leaves
FAILED: dict[Failure, str] = {
    "unreachable": "could not be reached",
    "timeout": "did not answer in time",
    "refused": "refused",
    "broken": "broke off",
    "damaged": "sent damaged bytes",
    "suspicious": "sent weights that are too far away",
}
"""What a peer did with which an exchange failed, for people."""


@dataclass(frozen=True)
class RoundReport:
    """Traffic, waiting time and refused contributions of one round."""

    sent: int
    """Bytes that this node sent since the round before, of any kind."""
    received: int
    wait_s: float
    """Seconds that training stood still for the exchange."""
    rejected: list[RejectedUpdate]
    odd: bool = False
    """True without a partner because the number of peers was odd."""
    why: str = ""
    """Why the round had no partner, for people; nothing if it had one."""


class TrainingMember:
    """A peer that trains in a swarm: announces itself, follows the rounds, hands out weights, and counts what a round costs.

    All methods are for the thread that trains. Nothing is served or announced before ``serve`` or ``announce``.

    Args:
        membership: this peer's place in the swarm.
        opt, exchange, screen: the outer optimizer, its exchange, and the screen that refuses others' updates.
        model: digest of the model's shapes.
        name: of this node, for people.
        publisher: the directory that announcements go to; None if the caller publishes ``fields`` itself.
        clock: seconds; a simulation has its own.
    """

    def __init__(
        self,
        membership: MemberView,
        opt: OuterOptimizer,
        exchange: PairExchange | GroupExchange,
        screen: DistanceScreen,
        *,
        model: str,
        name: str,
        shard: Shard,
        publisher: Directory | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._membership, self._opt, self._screen, self._clock = membership, opt, screen, clock
        screen.newcomers.where = self._range
        self._name, self._model, self.shard, self._publisher = name, model, shard, publisher
        self.exchange = exchange
        self.lag_report = LagReport(opt, membership.host.traffic.rate, clock)
        self.reporter: StatusReporter | None = None
        """Sends this node's status to those who watch the swarm, once it is set."""
        self._sync: OuterSync | None = None
        self._sent = self._received = self._odd = 0
        self._waited = 0.0

    @property
    def sync(self) -> OuterSync:
        """The optimizer's link to the swarm; only after ``serve``."""
        assert self._sync is not None
        return self._sync

    @property
    def self_report(self) -> SelfReport:
        """This node's account of its own exchanges; only after ``serve``."""
        return self.sync.self_report

    def serve(self) -> None:
        """Answer peers that ask for the slow weights from now on."""
        self._sync = OuterSync(self._membership, self._model, self._opt, self.exchange, self._screen, self._clock)

    def begin(self, state: State | None = None) -> None:
        """Start from ``state``, the swarm's weights, or from what the optimizer holds; before the first step."""
        if self._sync is None:
            self.serve()
        if state is not None:
            self.sync.begin_from(state)
        self.sync.begin()

    def fields(self, state: DirectoryState, loss: float | None, steps_per_s: float) -> dict[str, Any]:
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
        }

    def announce(
        self,
        state: DirectoryState,
        loss: float | None = None,
        steps_per_s: float = 0.0,
        tokens_per_s: float = 0.0,
        mfu: float | None = None,
    ) -> None:
        """Publish where training is and how fast: to those who watch, and in the directory. Returns at once."""
        opt = self._opt
        if self.reporter is not None:
            lag = self.lag_report.details()
            self.reporter.progress(state, opt.round, opt.steps, loss, steps_per_s, tokens_per_s, mfu, lag)
        if self._publisher is not None:
            details = {} if self._sync is None else self.self_report.details()
            details |= {"tokens_per_s": rate(tokens_per_s), "mfu": share(mfu), **self.lag_report.details()}
            self._publisher.announce(**self.fields(state, loss, steps_per_s), details=details)

    def start_counting(self) -> None:
        """Leave the bytes sent and received up to now out of the first round."""
        traffic = self._membership.host.traffic
        self._sent, self._received = traffic.sent, traffic.received

    def on_round(self, info: RoundInfo, wait_s: float | None = None) -> RoundReport:
        """Follow a round that is over: the optimizer's ``on_round``. ``wait_s`` None: the wait that the exchange measured."""
        self.sync.on_round(info)
        self._screen.newcomers.see(self._membership.directory.members())
        traffic, waited = self._membership.host.traffic, self.exchange.waited
        wait_s = waited - self._waited if wait_s is None else wait_s
        odd = self.exchange.stats.odd
        rejections = self._screen.rejections()
        why = "" if len(info.members) > 1 else self._why(info, odd > self._odd)
        report = RoundReport(traffic.sent - self._sent, traffic.received - self._received, wait_s, rejections, odd > self._odd, why)
        self._sent, self._received, self._waited, self._odd = traffic.sent, traffic.received, waited, odd
        self.self_report.waited(wait_s)
        self.lag_report.on_round(info, wait_s, report.sent)
        return report

    def _why(self, info: RoundInfo, odd: bool) -> str:
        """Return why a round had no partner."""
        members, me = self._membership.directory.members(), self._membership.identity.peer_id
        others = {peer: member for peer, member in members.items() if peer != me}
        fitting = [peer for peer, member in others.items() if member.model == self._model]
        if failures := self.exchange.stats.failures(info.key):
            peer, kind = failures[-1]
            return f"{others[peer].name if peer in others else short(peer)} {FAILED[kind]}"
        if not fitting:
            return "nobody else is here" if not others else "all others train another model"
        return "the number of members is odd" if odd else "all others were taken, or in other rounds"

    def _range(self, peer: str) -> str:
        """Return the address range in which a peer was met, or says that it is; one for all that say nothing."""
        member = self._membership.directory.members().get(peer)
        said = member.addresses[0] if member is not None and member.addresses else ""
        return range_of(self._membership.host.met.get(peer) or host_of(said))

    def report_round(self, info: RoundInfo, report: RoundReport, loss: float | None) -> None:
        """Send what a round came to, to those who watch. ``loss``: this node's training loss, nats."""
        if self.reporter is not None:
            self.reporter.round(
                info.members, round=info.key.round, step=info.step, loss=loss, sent=report.sent, received=report.received,
                wait_s=report.wait_s, suspicious=len(report.rejected), odd=report.odd,
                projection=self._opt.projection_of(info.key.fragment),
            )  # fmt: skip

    def after_step(self) -> bool:
        """Do what is due between two steps. True if the swarm's weights were taken over just now, after a missed round."""
        return self.sync.after_step()

    def at_rest(self) -> AbstractContextManager[None]:
        """Return a block in which the slow weights stay as they are: who asks for them meanwhile gets them at once."""
        return self.sync.at_rest()

    def leave(
        self, loss: float | None = None, steps_per_s: float = 0.0, tokens_per_s: float = 0.0, mfu: float | None = None
    ) -> None:
        """Announce that this node leaves, so that nobody waits for it; without an answer its record expires."""
        self.announce("leaving", loss, steps_per_s, tokens_per_s, mfu)
        if self._publisher is not None:
            self._publisher.leave(LEAVE_S)
