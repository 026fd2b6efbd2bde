"""One training peer's duties towards its swarm, the same for ``shoal up``, loops of one's own and simulated peers.

A node's account of its own exchanges and of missing members, for its record in the directory and for its user.

Members that vanish together, unlike crashed machines, which vanish one by one, show a network partition. A member vanishes when its
record expires though it did not announce that it leaves. A node suspects a partition if at least two vanished at about the same
moment, or all others did, even a single one: then this node may be the one that is cut off. The suspicion ends when a vanished
member returns. It is no proof: one machine with two nodes looks the same when it loses power.

Keep an outer optimizer in step with its swarm: the round it is in, the weights it takes over, and those it hands out.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.optim import FLOAT32, OuterOptimizer, RoundInfo
from shoal.swarm.exchange.contribution import RECENT, ExchangeStats
from shoal.swarm.exchange.cost import every_that_fits
from shoal.swarm.exchange.pair.exchange import PairExchange
from shoal.swarm.exchange.robust import DistanceScreen, RejectedUpdate
from shoal.swarm.manifest import MAX_GROUP
from shoal.swarm.membership.directory import Directory
from shoal.swarm.membership.directory import State as DirectoryState
from shoal.swarm.membership.membership import SHOAL_VERSION, Membership
from shoal.swarm.p2p.addresses import range_met
from shoal.swarm.p2p.stream import short
from shoal.swarm.state.resync import DriftDetector, Resynchronizer, in_step
from shoal.swarm.state.selection import StateServer
from shoal.swarm.state.snapshot import CHUNKS_PROTOCOL, State
from shoal.swarm.topics.status import StatusReporter
from shoal.swarm.training.factories import Rates
from shoal.swarm.training.shard import Shard
from shoal.swarm.wire.envelope import Failure, Sketch, rate, real, share
from shoal.swarm.wire.messages import MAX_MISSING, Member

if TYPE_CHECKING:
    from shoal.swarm.exchange.group.exchange import GroupExchange

# A record is renewed every 5 s and read every 5 s: last signs of peers that were cut off together differ by both and a margin.
WITHIN = 12.0
CONFIRM = 10.0  # seconds that a member must be missing: a node that slept itself finds all records expired until it reads again
FORGET = 3600.0  # seconds after which a missing member is forgotten


@dataclass(frozen=True)
class SuspectedPartition:
    """Suspicion that members ``names`` of ``of`` were cut off: their last signs lie within ``within_s`` seconds."""

    names: tuple[str, ...]
    of: int
    within_s: float

    def __str__(self) -> str:
        some = ", ".join(self.names[:MAX_MISSING]) + (", …" if len(self.names) > MAX_MISSING else "")
        return (
            f"a partition is suspected: {len(self.names)} of {self.of} members vanished within {self.within_s:.0f} s ({some}); "
            f"training goes on with {self.of - len(self.names)}, and they come together again by themselves"
        )

    def fields(self) -> dict[str, Any]:
        """Return the fields of a `Member` that report it."""
        return {
            "missing": len(self.names),
            "missing_of": self.of,
            "missing_within_s": self.within_s,
            "missing_names": tuple(name[:16] for name in self.names[:MAX_MISSING]),
        }


@dataclass
class _LastSign:
    name: str
    issued: float
    heard: float
    missing_since: float | None = None


class PartitionDetector:
    """Detector that follows the members in view. ``me``: the own peer id. Seconds are of a monotonic clock of the caller."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._seen: dict[str, _LastSign] = {}
        self.suspected: SuspectedPartition | None = None

    def look(
        self, members: Mapping[str, Member], left: Collection[str], now: float, belongs: Callable[[str], bool] = lambda peer: True
    ) -> list[str]:
        """Note the members in view and those that left on purpose; return what to report, in sentences.

        ``belongs``: predicate of peers that would be in view if they were there; others were reassigned to another bucket.
        """
        back = []
        for peer, member in members.items():
            seen = self._seen.get(peer)
            if seen is None or seen.issued != member.issued or seen.missing_since is not None:
                if seen is not None and self._confirmed(seen, now):
                    back.append(member.name)
                self._seen[peer] = _LastSign(member.name, member.issued, now)
        for peer in [peer for peer in self._seen if peer not in members]:
            seen = self._seen[peer]
            if seen.missing_since is None:
                seen.missing_since = now
            if peer in left or peer == self._me or not belongs(peer) or now - seen.missing_since > FORGET:
                del self._seen[peer]
        before, self.suspected = self.suspected, self._suspect(members, now)
        if self.suspected is not None and (before is None or set(self.suspected.names) - set(before.names)):
            return [str(self.suspected)]
        if before is not None and (returned := sorted(set(back) & set(before.names))):
            still = f"; {len(self.suspected.names)} are still missing" if self.suspected is not None else ""
            return [f"together again with {', '.join(returned[:MAX_MISSING])}{', …' if len(returned) > MAX_MISSING else ''}{still}"]
        return []

    def _confirmed(self, seen: _LastSign, now: float) -> bool:
        return seen.missing_since is not None and now - seen.missing_since >= CONFIRM

    def _suspect(self, members: Mapping[str, Member], now: float) -> SuspectedPartition | None:
        missing = sorted((seen for seen in self._seen.values() if self._confirmed(seen, now)), key=lambda seen: seen.heard)
        together: list[_LastSign] = []
        for first, earliest in enumerate(missing):
            these = [seen for seen in missing[first:] if seen.heard - earliest.heard <= WITHIN]
            together = max(together, these, key=len)
        alone = not members.keys() - {self._me}
        if len(together) < 2 and not (together and alone):
            return None
        names = tuple(sorted(seen.name for seen in together))
        return SuspectedPartition(names, len(members.keys() | {self._me}) + len(names), together[-1].heard - together[0].heard)


LOOK_S = 1.0  # seconds between two looks at the members: records change every five
AGAIN_S = 600.0  # seconds between two sentences about weights that differ: a hostile peer may say so of its own in each round


class SelfReport:
    """One node's account. ``sketch`` gives a sketch of the slow weights (``shoal.swarm.state.resync``); ``clock``: seconds."""

    def __init__(
        self,
        stats: ExchangeStats,
        directory: Directory,
        me: str,
        sketch: Callable[[], Sketch | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stats, self._directory, self._sketch, self._clock = stats, directory, sketch, clock
        self.absence = PartitionDetector(me)
        self._waits: deque[float] = deque(maxlen=RECENT)
        self._looked = float("-inf")
        self._apart: dict[bool, float] = {}
        """When it was said last that weights differ, by whether this node gives way."""
        self._news: list[str] = []

    def waited(self, seconds: float) -> None:
        """Note that training stood still for ``seconds`` in the round that has just ended."""
        self._waits.append(seconds)

    def apart(self, peers: Collection[str], members: Mapping[str, Member], gives_way: bool) -> None:
        """Note, for ``news``, that the weights of ``peers`` differ from this node's; once for each event."""
        now = self._clock()
        if not peers or now - self._apart.get(gives_way, float("-inf")) < AGAIN_S:
            return
        self._apart[gives_way] = now
        names = [members[peer].name if peer in members else short(peer) for peer in sorted(peers)]
        them = "1 other member" if len(names) == 1 else f"{len(names)} other members"
        them += f" ({', '.join(names[:MAX_MISSING])}{', …' if len(names) > MAX_MISSING else ''})"
        who = (
            f"this node's weights differ from those of {them}, so it takes over theirs"
            if gives_way
            else f"the weights of {them} differ from this node's, and are to give way to them"
        )
        self._news.append(f"{who}; to load other weights on purpose, call opt.restart_from_model() on all members")

    def news(self) -> list[str]:
        """Return the sentences about differing weights that were not returned yet."""
        news, self._news = self._news, []
        return news

    def details(self) -> dict[str, Any]:
        """Return the fields of this node's ``Member`` that have defaults."""
        suspected = self.absence.suspected
        return {
            **self.stats.report(),
            "wait_s": sum(self._waits) / len(self._waits) if self._waits else 0.0,
            "sketch": self._sketch(),
            **(suspected.fields() if suspected is not None else {}),
        }

    def events(self) -> list[str]:
        """Return sentences about members that vanished or came back. Looks at most once a second, and touches no network."""
        now = self._clock()
        if now - self._looked < LOOK_S:
            return []
        self._looked = now
        return self.absence.look(self._directory.everyone(), self._directory.departed(), now, self._directory.belongs)


log = logging.getLogger(__name__)


class OuterSync:
    """One optimizer's link to its swarm; hands out its slow weights from now on. All is for the thread that trains.

    Args:
        membership: this peer's place in the swarm.
        model: digest of the model's shapes.
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
        self._opt, self._exchange, self._screen, self._directory = opt, exchange, screen, membership.directory
        host, me = membership.host, membership.identity.peer_id
        shapes = opt.shapes
        host.resource_manager.meter(CHUNKS_PROTOCOL, max(int(membership.network.models_per_hour * FLOAT32.nbytes(shapes)), 1))
        self._server = StateServer(host, membership.swarm, model, shapes, clock)
        self._resynchronizer = Resynchronizer(
            membership, model, self._server, opt, exchange.stats, self._took_over, clock, lambda: exchange.partners
        )
        self._drift = DriftDetector(me, model, MAX_GROUP)
        self._restarts = opt.restarts
        self.self_report = SelfReport(exchange.stats, membership.directory, me, self._sketch, clock)
        """This node's account of its own exchanges, for its record in the directory."""
        exchange.sketch = self._sketch

    def begin_from(self, state: State) -> None:
        """Take over the weights and the round of ``state``: of a swarm that is under way, or those that it begins with."""
        round = in_step(self._opt, state)
        self._opt.adopt(state.slow, round=round, into_model=True, shared=state.extra, applied=state.applied)
        if state.round > 0:
            self._opt.listen()  # others' weights, not yet trained here: the first round has weight 0
        self._resynchronizer.joined(state)
        self._server.keep(state)

    def begin(self) -> None:
        """Set the exchange to the round that the optimizer hands in next; before the first step, when all else is loaded.

        That is the oldest of the rounds in flight, if a checkpoint has any, for the first step begins them anew. Set to a later
        one, the exchange would send ahead a partner that calls for them before.
        """
        opt = self._opt
        begun_anew = itertools.chain.from_iterable(opt.in_flight(fragment) for fragment in range(opt.fragments))
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
                "no other peer is near round %d: this node goes back to round %d, where the others are", opt.round, ahead_of
            )
            opt.go_back(ahead_of)
            self._drift.moved()
        if behind:  # the contribution was counted in another round than its own
            self._drift.moved()
        elif opt.anchored and info.key.fragment < opt.fragments:
            self._drift.finished(info.key.round, info.key.fragment, opt.sketch_of(info.key.fragment))
        split = None
        # A node that knows that its weights have diverged, or that was alone just now, knows why they differ.
        explained = behind or len(info.members) < 2 or self._resynchronizer.diverged
        if opt.anchored and info.key.fragment < opt.fragments and not explained:
            members = self._directory.members()
            split = self._drift.split(members, self._exchange.sketches, self._exchange.partners)
            self.self_report.apart(self._drift.apart, members, split is not None)
        self._resynchronizer.on_round(info, behind=behind, split=split)

    def after_step(self) -> bool:
        self._follow_restart()
        back = self._resynchronizer.adopt_fetched()
        if back:
            self._exchange.next_round = self._opt.round
        self.offer()
        return back

    def _follow_restart(self) -> None:
        """Forget what is known of the weights before, if others were loaded on purpose: no fetched ones must replace these."""
        if self._opt.restarts != self._restarts:
            self._restarts = self._opt.restarts
            self._resynchronizer.restarted()
            self._took_over()

    def offer(self) -> None:
        self._server.offer(self._state)

    def at_rest(self) -> AbstractContextManager[None]:
        """Return a block in which the slow weights do not change: peers that ask for them need not wait for its end."""
        return self._server.at_rest(self._state)

    def _state(self) -> State:
        opt = self._opt
        slow, shared = opt.slow, opt.shared
        applied = [min(applied, opt.round) for applied in opt.applied]  # later ones may end after it went back
        return State(opt.round, slow, shared, applied, gathers=getattr(opt, "gathers", 0))

    def _sketch(self) -> Sketch | None:
        return None if self._resynchronizer.diverged else self._drift.newest  # no peer should give way to diverged weights

    def _took_over(self) -> None:
        self._drift.moved()
        if not self._opt.anchored:  # it was refused for being far away, and is no longer
            self._screen.forget()


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
STANDING = Rates()
PROGRESS = ("state", "round", "step", "loss", "steps_per_s")  # what a member's record and its status both have
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
        membership: Membership,
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
        self._sent = self._received = self._odd = self._tokens = 0
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
        self._sync = OuterSync(self._membership, self._model, self._opt, self.exchange, self._screen, self._clock)

    def begin(self, state: State | None = None) -> None:
        """Start from ``state``, the swarm's weights, or from what the optimizer holds; before the first step."""
        if self._sync is None:
            self.serve()
        self._tokens = self._opt.tokens  # those of a resumed run are in earlier rounds
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

    def announce(self, state: DirectoryState, loss: float | None = None, rates: Rates = STANDING) -> None:
        """Publish where training is and how fast: to those who watch, and in the directory. Returns at once."""
        fields = self.fields(state, loss, rates.steps_per_s)
        speed = {"tokens_per_s": rate(rates.tokens_per_s), "mfu": share(rates.mfu), **self.lag_report.details()}
        if self.reporter is not None:
            self.reporter.progress({name: fields[name] for name in PROGRESS} | speed)
        if self._publisher is not None:
            details = {} if self._sync is None else self.self_report.details()
            self._publisher.announce(**fields, **details, **speed)

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
        member = self._membership.directory.members().get(peer)
        return range_met(peer, member.addresses if member is not None else (), self._membership.host.met)

    def report_round(self, info: RoundInfo, report: RoundReport, loss: float | None) -> None:
        """Send what a round came to, to those who watch. ``loss``: this node's training loss, nats."""
        tokens, self._tokens = self._opt.tokens - self._tokens, self._opt.tokens
        if self.reporter is not None:
            self.reporter.round(
                info.members, tokens=max(tokens, 0),
                round=info.key.round, step=info.step, loss=loss, sent=report.sent, received=report.received,
                wait_s=report.wait_s, suspicious=len(report.rejected), odd=report.odd,
                projection=self._opt.projection_of(info.key.fragment),
            )  # fmt: skip

    def after_step(self) -> bool:
        """Do what is due between two steps. True if the swarm's weights were taken over just now, after a missed round."""
        return self.sync.after_step()

    def at_rest(self) -> AbstractContextManager[None]:
        """Return a block in which the slow weights stay as they are: who asks for them meanwhile gets them at once."""
        return self.sync.at_rest()

    def leave(self, loss: float | None = None, rates: Rates = STANDING) -> None:
        """Announce that this node leaves, so that nobody waits for it; without an answer its record expires."""
        self.announce("leaving", loss, rates)
        if self._publisher is not None:
            self._publisher.leave(LEAVE_S)
