"""One training peer's duties towards its swarm, the same for ``shoal up``, loops of one's own and simulated peers."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.optim import OuterOptimizer, RoundInfo
from shoal.swarm.exchange.cost import every_that_fits
from shoal.swarm.exchange.pair.exchange import PairExchange
from shoal.swarm.exchange.robust import DistanceScreen, RejectedUpdate
from shoal.swarm.membership.directory import Directory
from shoal.swarm.membership.directory import State as DirectoryState
from shoal.swarm.membership.membership import SHOAL_VERSION, MemberView
from shoal.swarm.p2p.multiaddr import host_of, range_of
from shoal.swarm.p2p.stream import short
from shoal.swarm.state.snapshot import State
from shoal.swarm.topics.status_reporter import StatusReporter
from shoal.swarm.training.outer_sync import OuterSync
from shoal.swarm.training.self_report import SelfReport
from shoal.swarm.training.shard import Shard
from shoal.swarm.wire.fields import Failure, rate, real, share

if TYPE_CHECKING:
    from shoal.swarm.exchange.group.exchange import GroupExchange

MBIT = 125_000  # bytes
FULL = 8  # exchanges in a row that took a whole round, after which the user is informed
WAITED_S = 0.05  # seconds of waiting that count as such


class LagReport:
    """Account of the exchanges of ``opt``; for the thread that trains.

    ``rate``: returns the bytes a second that this node's link carries, None where that is not known. ``clock``: seconds.
    """

    def __init__(
        self, opt: OuterOptimizer, rate: Callable[[], float | None] = lambda: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._opt, self._rate, self._clock = opt, rate, clock
        self.late = 0
        """Exchanges so far that came after their lag."""
        self._waits: deque[float] = deque(maxlen=FULL)
        self._reported = False
        self._rounds: deque[tuple[int, float, int]] = deque(maxlen=FULL)  # bytes sent, seconds of computing, inner steps
        self._over: tuple[float, int] | None = None  # when the last exchange was applied, and after how many inner steps

    def on_round(self, info: RoundInfo, wait_s: float, sent: int = 0) -> None:
        """Note an exchange that was applied; training stood still for ``wait_s`` seconds since the one before, and this node sent
        ``sent`` bytes of all kinds.
        """
        self.late += info.late
        now, over = self._clock(), self._over
        self._over = now, info.step
        if len(info.members) > 1 and wait_s > WAITED_S and over is not None:
            self._rounds.append((sent, now - over[0] - wait_s, info.step - over[1]))
        else:
            self._rounds.clear()
        if len(info.members) > 1 and wait_s > WAITED_S and self._opt.lag_auto and self._opt.lag >= self._opt.schedule.every:
            self._waits.append(wait_s)
        else:
            self._waits.clear()

    def details(self) -> dict[str, Any]:
        """Return the fields of `shoal.swarm.wire.member.Member` about the lag."""
        return {"lag": self._opt.lag, "lag_auto": self._opt.lag_auto, "late": self.late}

    def events(self) -> list[str]:
        """Return a sentence, once, if the link does not carry the settings: exchanges take longer than a round's computing."""
        if self._reported:
            return []
        sentence = self._too_slow()
        if not sentence and len(self._waits) == FULL:
            sentence = (
                f"Exchanges take this node longer than a round, so training waits for each ({sum(self._waits) / FULL:.2g} s "
                "recently): longer rounds (outer.every) or a smaller codec (outer.codec) would end that, more fragments would not; "
                "`shoal plan` shows which settings fit this link."
            )
        self._reported = bool(sentence)
        return [sentence] if sentence else []

    def _too_slow(self) -> str:
        rate = self._rate()
        nbytes, seconds, steps = (sum(part) for part in zip(*self._rounds, strict=True)) if self._rounds else (0, 0.0, 0)
        if rate is None or len(self._rounds) < FULL or nbytes <= rate * seconds or seconds <= 0 or steps <= 0:
            return ""
        every, params = self._opt.schedule.every, sum(math.prod(shape) for shape in self._opt.shapes)
        return (
            f"This node's link carries {rate / MBIT:.2g} Mbit/s, but these settings send {nbytes / seconds / MBIT:.2g} Mbit/s for "
            f"the time that it computes, so training waits for the network: rounds of "
            f"{every_that_fits(every, nbytes / seconds, rate)} inner steps (outer.every, now {every}) or a smaller codec "
            f"(outer.codec) would fit; see `shoal plan --params {params} --mbit {rate / MBIT:.2g} --step {seconds / steps:.2g}`."
        )


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
