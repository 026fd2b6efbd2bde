"""The diagnosis of a running node: what is wrong, and what to do, in sentences for its user, and in
numbers for its record.

The exchange, the optimizer and the directory report numbers, of which `Notice` are made here. Each
is said once while it lasts, or at most as often as its constant says. `TrainingMember.news` hands
them on.

Members that vanish together, unlike crashed machines, which vanish one by one, show a network
partition. A member vanishes when its record expires though it did not announce that it leaves. A
node suspects a partition if at least two vanished at about the same moment, or all others did, even
a single one: then this node may be the one that is cut off. The suspicion ends when a vanished
member returns. It is no proof: one machine with two nodes looks the same when it loses power.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shoal.optim import OuterOptimizer, RoundInfo, Steps
from shoal.swarm.errors import Repeats
from shoal.swarm.exchange.contribution import RECENT, ExchangeStats
from shoal.swarm.exchange.cost import BUSY
from shoal.swarm.exchange.robust import RejectedUpdate
from shoal.swarm.membership.directory import Directory
from shoal.swarm.membership.health_report import FAILED, PARTNERLESS, partner_remedy
from shoal.swarm.p2p.newest import Newest
from shoal.swarm.p2p.stream import short
from shoal.swarm.refusals import listed
from shoal.swarm.wire.envelope import Sketch
from shoal.swarm.wire.messages import Member
from shoal.swarm.wire.record import MAX_MISSING

# A record is renewed every 5 s and read every 5 s: last signs of peers that were cut off together
# differ by both and a margin.
WITHIN = 12.0
# seconds that a member must be missing: a node that slept itself finds all records expired until it
# reads again
CONFIRM = 10.0
FORGET = 3600.0  # seconds after which a missing member is forgotten


@dataclass(frozen=True)
class SuspectedPartition:
    """Suspicion that members ``names`` of ``of`` were cut off: their last signs lie within
    ``within_s`` seconds.
    """

    names: tuple[str, ...]
    of: int
    within_s: float

    def __str__(self) -> str:
        return (
            f"a partition is suspected: {len(self.names)} of {self.of} members vanished within "
            f"{self.within_s:.0f} s ({_some(self.names)}); training goes on with "
            f"{self.of - len(self.names)}, and they come together again by themselves"
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
    """Detector that follows the members in view.

    ``me``: the own peer id. Seconds are of a monotonic clock of the caller.
    """

    def __init__(self, me: str) -> None:
        self._me = me
        self._seen = Newest[str, _LastSign](4096)  # anybody may publish records, and renew none
        self.suspected: SuspectedPartition | None = None

    def look(
        self,
        members: Mapping[str, Member],
        left: Collection[str],
        now: float,
        belongs: Callable[[str], bool] = lambda peer: True,
    ) -> list[str]:
        """Note the members in view and those that left on purpose; return what to report, in
        sentences.

        ``belongs``: predicate of peers that would be in view if they were there; others were
        reassigned to another bucket.
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
            if (
                peer in left
                or peer == self._me
                or not belongs(peer)
                or now - seen.missing_since > FORGET
            ):
                del self._seen[peer]
        before, self.suspected = self.suspected, self._suspect(members, now)
        if self.suspected is not None and (
            before is None or set(self.suspected.names) - set(before.names)
        ):
            return [str(self.suspected)]
        if before is not None and (returned := sorted(set(back) & set(before.names))):
            still = (
                f"; {len(self.suspected.names)} are still missing"
                if self.suspected is not None
                else ""
            )
            return [f"together again with {_some(returned)}{still}"]
        return []

    def _confirmed(self, seen: _LastSign, now: float) -> bool:
        return seen.missing_since is not None and now - seen.missing_since >= CONFIRM

    def _suspect(self, members: Mapping[str, Member], now: float) -> SuspectedPartition | None:
        missing = sorted(
            (seen for seen in self._seen.values() if self._confirmed(seen, now)),
            key=lambda seen: seen.heard,
        )
        first = 0
        longest = slice(0)
        for last, seen in enumerate(missing):
            while seen.heard - missing[first].heard > WITHIN:
                first += 1
            longest = max(
                longest, slice(first, last + 1), key=lambda part: part.stop - (part.start or 0)
            )
        together = missing[longest]
        alone = not members.keys() - {self._me}
        if len(together) < 2 and not (together and alone):
            return None
        names = tuple(sorted(seen.name for seen in together))
        return SuspectedPartition(
            names,
            len(members.keys() | {self._me}) + len(names),
            together[-1].heard - together[0].heard,
        )


SEVERAL = 3  # rounds in a row without a partner that are worth a sentence


class Notice(NamedTuple):
    """A sentence for this node's user; ``about``: partition, partner, weights, update, refused,
    lag, membership, or internal.
    """

    about: str
    said: str


NOBODY = ("nobody", "model", "odd")  # reasons of an exchange with whom nobody was there
LOOK_S = 1.0  # seconds between two looks at the members: records change every five
# seconds between two sentences about weights that differ: a hostile peer may say so of its own in
# each round
AGAIN_S = 600.0
KEPT = 64  # notices that are not read yet
REFUSED_S = 60.0  # seconds between two sentences about what was refused of others


class Diagnosis:
    """The diagnosis of one node.

    ``sketch`` gives a sketch of the slow weights (`shoal.swarm.state.resync`); ``clock``: seconds.
    ``in_seconds``: the swarm's rounds last so many seconds.
    """

    def __init__(
        self,
        stats: ExchangeStats,
        directory: Directory,
        me: str,
        sketch: Callable[[], Sketch | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        *,
        in_seconds: bool = False,
    ) -> None:
        self._in_seconds = in_seconds
        self.stats = stats
        self._directory = directory
        self._me = me
        self._sketch = sketch
        self.absence = PartitionDetector(me)
        self._waits: deque[float] = deque(maxlen=RECENT)
        self._said = Repeats(clock)
        self._news = deque[Notice](maxlen=KEPT)
        # exchanges in a row without a partner, not counting those in which the number of members
        # was odd
        self._without = 0
        self._partnerless: tuple[str, int] | None = (
            None  # the reason, and for how many rounds by now
        )
        self._refused = Counter[str]()
        self._own_errors = 0  # exchanges in a row that an error of this node's own code ended
        self.exchanged = 0
        """Exchanges with others so far."""
        self._missed = Counter[str]()
        """Exchanges without one while others were there to exchange with, by the reason;
        "internal": by an own error.
        """

    def waited(self, seconds: float) -> None:
        """Note that training stood still for ``seconds`` in the round that has just ended."""
        self._waits.append(seconds)

    def met(self, info: RoundInfo, model: str, fragments: int, *, odd: bool) -> str:
        """Follow an exchange; return why it had no partner, if so.

        ``odd``: the number of members was, which is no fault.

        One that an error of this node's own code ended is no exchange without a partner:
        `own_error` describes it.
        """
        if self.own_error(info):
            self._erred(fragments)
            return ""
        self._own_errors = 0
        if len(info.members) > 1:
            self.exchanged += 1
            if self._said.over(*PARTNERLESS):
                self._news.append(
                    Notice(
                        "partner",
                        f"rounds have partners again, after {self._without // fragments} without",
                    )
                )
            self._without = 0
            self._partnerless = None
            return ""
        reason, why = self._why(info, model, odd)
        self._missed[reason] += reason not in NOBODY
        self._without += reason in PARTNERLESS
        rounds = self._without // fragments
        if rounds >= SEVERAL and reason in PARTNERLESS:
            self._partnerless = reason, rounds
            if self._said.due(reason):
                said = (
                    f"{rounds} rounds in a row had no partner ({why}), and training goes on "
                    f"without; {self._remedy(reason)}"
                )
                self._news.append(Notice("partner", said))
        return why

    def own_error(self, info: RoundInfo) -> str:
        """Return the first line of the error of this node's own code that ended the exchange
        ``info``; "" if none did.
        """
        return "" if len(info.members) > 1 else self.stats.of(info.key).own_error

    def _erred(self, fragments: int) -> None:
        """Note an exchange that an error of this node's own ended; a round of them is worth a
        sentence.
        """
        self._own_errors += 1
        self._without = 0
        self._partnerless = None
        self._missed["internal"] += 1
        if self._own_errors >= fragments and self._said.due("internal", AGAIN_S):
            said = (
                "this node trains alone: an error in its own code, and not in the network, ended "
                f"every exchange of its last {_rounds(self._own_errors // fragments)} "
                f"{self.stats.errors.newest()}"
            )
            self._news.append(Notice("internal", said))

    def trained_alone(self, fragments: int) -> str:
        """Return a sentence if nothing was ever exchanged though others were there: by an own
        error, or for several rounds.
        """
        missed = self._missed.total()
        if self.exchanged or not missed:
            return ""
        if count := self._missed["internal"]:
            return (
                "this node trained alone though others were there: an error in its own code, and "
                f"not in the network, ended {count} of {missed} exchanges "
                f"{self.stats.errors.newest()}"
            )
        if missed < SEVERAL * fragments:
            return ""
        (reason, _), *_ = self._missed.most_common(1)
        return (
            f"this node trained alone though others were there: none of {missed} exchanges had a "
            f"partner ({PARTNERLESS[reason][0]}); {self._remedy(reason)}"
        )

    def _remedy(self, reason: str) -> str:
        speeds = [member.steps_per_s for member in self._directory.members().values()]
        return partner_remedy(reason, speeds, in_seconds=self._in_seconds)

    def _why(self, info: RoundInfo, model: str, odd: bool) -> tuple[str, str]:
        """Return the reason why a round had no partner, a key of `PARTNERLESS` or "odd", and in
        words.
        """
        others = {
            peer: member for peer, member in self._directory.members().items() if peer != self._me
        }
        if failures := self.stats.of(info.key).failures:
            peer, kind = failures[-1]
            return kind, f"{_name(peer, others)} {FAILED[kind]}"
        if not any(member.model == model for member in others.values()):
            reason = "model" if others else "nobody"
            return reason, PARTNERLESS[reason][0]
        if odd:
            return "odd", "the number of members is odd"
        if passed := self.stats.passed(info.key):
            peer, last = passed[-1]
            what = "held training for too long" if last is None else FAILED[last]
            more = f", as {len(passed) - 1} more are" if len(passed) > 1 else ""
            return (
                last or "timeout",
                f"{_name(peer, others)} {what} before, and is passed over for a while{more}",
            )
        return "taken", PARTNERLESS["taken"][0]

    def rejected(self, updates: Sequence[RejectedUpdate]) -> None:
        """Note the contributions that were refused because they lay too far away, or for their
        loss.
        """
        members = self._directory.everyone() if updates else {}
        for update in updates:
            what = (
                f"refused what {_name(update.peer, members)} sent in round {update.key.round}: "
                f"{update}"
            )
            self._news.append(
                Notice("update", f"{what}; if you trust all peers, set {update.unless}")
            )

    def refused(self, counts: Mapping[str, int]) -> None:
        """Note how many streams, calls and records of others were refused so far, by reason."""
        if (since := Counter(counts) - self._refused) and self._said.due("refusals", REFUSED_S):
            self._refused = Counter(counts)
            self._news.append(
                Notice(
                    "refused", f"refused from other peers since it was last said: {listed(since)}"
                )
            )

    def apart(self, peers: Collection[str], members: Mapping[str, Member], gives_way: bool) -> None:
        """Note that the weights of ``peers`` differ from this node's; once for each event."""
        if not peers or not self._said.due(gives_way, AGAIN_S):
            return
        names = [_name(peer, members) for peer in sorted(peers)]
        them = f"{len(names)} other member{'s' if len(names) > 1 else ''} ({_some(names)})"
        who = (
            f"this node's weights differ from those of {them}, so it takes over theirs"
            if gives_way
            else f"the weights of {them} differ from this node's, and are to give way to them"
        )
        said = (
            f"{who}; to load other weights on purpose, call opt.restart_from_model() on all members"
        )
        self._news.append(Notice("weights", said))

    def details(self) -> dict[str, Any]:
        """Return the fields of this node's ``Member`` that have defaults."""
        suspected = self.absence.suspected
        return {
            **self.stats.report(),
            "internal_errors": self.stats.errors.total,
            "wait_s": self._round_wait_s(),
            "partnerless": self._partnerless,
            "sketch": self._sketch(),
            **(suspected.fields() if suspected is not None else {}),
        }

    def _round_wait_s(self) -> float:
        return sum(self._waits) / len(self._waits) if self._waits else 0.0

    def seconds(self) -> dict[str, float]:
        """Return the fields of `shoal.swarm.wire.record.Exchanges` that are recent seconds."""
        return {
            "exchange_s": self.stats.report()["exchange_s"],
            "round_wait_s": self._round_wait_s(),
        }

    def faults(self) -> dict[str, Any]:
        """Return the fields of `shoal.swarm.wire.record.Faults` about others and the network."""
        report = self.stats.report()
        suspected = self.absence.suspected
        return {
            "recent": report["exchanges"],
            "failures": report["failures"],
            "blamed": report["blamed"],
            "partnerless": self._partnerless,
            **(suspected.fields() if suspected is not None else {}),
        }

    def news(self) -> list[Notice]:
        """Return the notices that were not returned yet; looks for members that vanished at most
        once a second.
        """
        if self._said.due("look", LOOK_S):
            at = self._directory
            said = self.absence.look(at.everyone(), at.departed(), self._said.clock(), at.belongs)
            self._news += [Notice("partition", sentence) for sentence in said]
        self._news += [Notice("internal", sentence) for sentence in self.stats.errors.news()]
        return [self._news.popleft() for _ in range(len(self._news))]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_MISSING]) + (", …" if len(names) > MAX_MISSING else "")


def _name(peer: str, members: Mapping[str, Member]) -> str:
    return members[peer].name if peer in members else short(peer)


def _rounds(count: int) -> str:
    return "round" if count <= 1 else f"{count} rounds"


MBIT = 125_000  # bytes
FULL = 8  # exchanges in a row that took a whole round, after which the user is informed
WAITED_S = 0.05  # seconds of waiting that count as such


class LagReport:
    """Account of the exchanges of ``opt``; for the thread that trains.

    ``rate``: returns the bytes a second that this node's link carries, None where that is not
    known. ``clock``: seconds.
    """

    def __init__(
        self,
        opt: OuterOptimizer,
        rate: Callable[[], float | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._opt = opt
        self._rate = rate
        self._said = Repeats(clock)
        self.late = 0
        """Exchanges so far that came after their lag."""
        self._waits: deque[float] = deque(maxlen=FULL)
        self._rounds: deque[tuple[int, float, int]] = deque(
            maxlen=FULL
        )  # bytes sent, seconds of computing, inner steps
        self._over: tuple[float, int] | None = (
            None  # when the last exchange was applied, and after how many inner steps
        )

    def on_round(self, info: RoundInfo, wait_s: float, sent: int = 0) -> None:
        """Note an exchange that was applied; training stood still for ``wait_s`` seconds since the
        one before, and this node sent ``sent`` bytes of all kinds.
        """
        self.late += info.late
        now = self._said.clock()
        over = self._over
        self._over = now, info.step
        if len(info.members) > 1 and wait_s > WAITED_S and over is not None:
            self._rounds.append((sent, now - over[0] - wait_s, info.step - over[1]))
        else:
            self._rounds.clear()
        if (
            len(info.members) > 1
            and wait_s > WAITED_S
            and self._opt.lag_auto
            and self._opt.lag >= self._opt.schedule.every
        ):
            self._waits.append(wait_s)
        else:
            self._waits.clear()

    def details(self) -> dict[str, Any]:
        return {"lag": self._opt.lag, "lag_auto": self._opt.lag_auto, "late": self.late}

    def news(self) -> list[Notice]:
        """Return a sentence, once, if the link does not carry the settings: exchanges take longer
        than a round's computing.
        """
        sentence = self._too_slow()
        if not sentence and len(self._waits) == FULL:
            sentence = (
                "Exchanges take this node longer than a round, so training waits for each "
                f"({sum(self._waits) / FULL:.2g} s recently): longer rounds ({self._longer()}) or "
                "a smaller codec (outer.codec) would end that, more fragments would not; `shoal "
                "plan` shows which settings fit this link."
            )
        return [Notice("lag", sentence)] if sentence and self._said.due("lag") else []

    def _longer(self) -> str:
        """Return the setting that says how long a round is."""
        return "outer.every" if isinstance(self._opt.length, Steps) else "outer.round"

    def _too_slow(self) -> str:
        rate = self._rate()
        nbytes, seconds, steps = (
            (sum(part) for part in zip(*self._rounds, strict=True)) if self._rounds else (0, 0.0, 0)
        )
        if (
            rate is None
            or len(self._rounds) < FULL
            or nbytes <= rate * seconds
            or seconds <= 0
            or steps <= 0
        ):
            return ""
        every = self._opt.schedule.every
        params = sum(math.prod(shape) for shape in self._opt.shapes)
        times = nbytes / seconds / (BUSY * rate)
        rounds = f"rounds of {math.ceil(every * times)} inner steps (outer.every, now {every})"
        if self._longer() != "outer.every":
            rounds = f"rounds {times:.2g} times as long ({self._longer()})"
        return (
            f"This node's link carries {rate / MBIT:.2g} Mbit/s, but these settings send "
            f"{nbytes / seconds / MBIT:.2g} Mbit/s for the time that it computes, so training "
            f"waits for the network: {rounds} or a smaller codec (outer.codec) would fit; see "
            f"`shoal plan --params {params} --mbit {rate / MBIT:.2g} --step "
            f"{seconds / steps:.2g}`."
        )
