"""The diagnosis of a running node: what is wrong, and what to do, in sentences for its user, and in
numbers for its record.

The exchange, the optimizer and the directory report numbers, of which `Notice` are made here. Each
is said once while it lasts, or at most as often as its constant says. `TrainingMember.news` hands
them on.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from shoal.optim import RoundInfo
from shoal.swarm.access.invitation import ASK
from shoal.swarm.exchange.contribution import RECENT, ExchangeStats
from shoal.swarm.exchange.robust import RejectedUpdate
from shoal.swarm.membership.directory import Directory
from shoal.swarm.membership.health_report import FAILED, PARTNERLESS, partner_remedy
from shoal.swarm.membership.last_step import at_their_end, still_training
from shoal.swarm.p2p.stream import short
from shoal.swarm.refusals import listed
from shoal.swarm.repeats import Repeats
from shoal.swarm.training.notice import Notice
from shoal.swarm.training.partition_detector import PartitionDetector, some
from shoal.swarm.wire.messages import Member

ALONE_ROUNDS = 3
"""Rounds in a row without a partner that are worth a sentence."""
NOBODY = ("nobody", "model")
"""Reasons of an exchange with whom nobody was there."""
THEIR_MODEL = "`shoal pull LINK` fetches their model while any of them serves"
LOOK_S = 1.0
"""Between two looks at the members: records change every five."""
SAY_AGAIN_S = 600.0
"""Between two sentences about weights that differ: a hostile peer may say so of its own in each
round.
"""
MAX_UNREAD = 64
"""Notices that are not read yet."""
SAY_REFUSED_S = 60.0
"""Between two sentences about what was refused of others."""


class Diagnosis:
    """The diagnosis of one node.

    ``clock``: seconds. ``in_seconds``: the swarm's rounds last so many seconds. ``has_expired``:
    whether this node's invitation has.
    """

    def __init__(
        self,
        stats: ExchangeStats,
        directory: Directory,
        me: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        in_seconds: bool = False,
        has_expired: Callable[[], bool] = lambda: False,
    ) -> None:
        self._in_seconds = in_seconds
        self._has_expired = has_expired
        self.stats = stats
        self._directory = directory
        self._me = me
        self.absence = PartitionDetector(me)
        self._waits: deque[float] = deque(maxlen=RECENT)
        self._said = Repeats(clock)
        self._news = deque[Notice](maxlen=MAX_UNREAD)
        # Exchanges in a row without a partner.
        self._without = 0
        # The reason, and for how many rounds by now.
        self._partnerless: tuple[str, int] | None = None
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

    def met(self, info: RoundInfo, model: str, fragments: int) -> str:
        """Follow an exchange; return why it had no partner, if so.

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
                rounds = self._without // fragments
                said = f"rounds have partners again, after {rounds} without"
                self._news.append(Notice("partner", said))
            self._without = 0
            self._partnerless = None
            return ""
        reason, why = self._why(info, model)
        self._missed[reason] += reason not in NOBODY
        self._without += 1
        rounds = self._without // fragments
        if rounds >= ALONE_ROUNDS:
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
        self._said.over(*PARTNERLESS)
        self._missed["internal"] += 1
        if self._own_errors >= fragments and self._said.due("internal", SAY_AGAIN_S):
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
        count = self._missed["internal"]
        if count:
            return (
                "this node trained alone though others were there: an error in its own code, and "
                f"not in the network, ended {count} of {missed} exchanges "
                f"{self.stats.errors.newest()}"
            )
        if missed < ALONE_ROUNDS * fragments:
            return ""
        (reason, _), *_ = self._missed.most_common(1)
        return (
            f"this node trained alone though others were there: none of {missed} exchanges had a "
            f"partner ({PARTNERLESS[reason][0]}); {self._remedy(reason)}"
        )

    def _have_others_ended(self) -> bool:
        known = {**self._directory.departed(), **self._directory.members()}
        return bool(at_their_end(known).keys() - {self._me})

    def _remedy(self, reason: str) -> str:
        if self._has_expired():
            return f"{ASK}, and join again by it with --resume"
        if reason == "nobody" and self._have_others_ended():
            return THEIR_MODEL
        speeds = [member.steps_per_s for member in self._directory.members().values()]
        return partner_remedy(reason, speeds, in_seconds=self._in_seconds)

    def _why(self, info: RoundInfo, model: str) -> tuple[str, str]:
        """Return the reason why a round had no partner, a key of `PARTNERLESS`, and in words."""
        if self._has_expired():
            return "refused", "this node's invitation has expired"
        others = dict(self._directory.members())
        others.pop(self._me, None)
        failures = self.stats.of(info.key).failures
        if failures:
            peer, kind = failures[-1]
            return kind, f"{_name(peer, others)} {FAILED[kind]}"
        training = still_training(others)
        if not any(member.model == model for member in training.values()):
            reason = "model" if training else "nobody"
            if reason == "nobody" and self._have_others_ended():
                return reason, "all others have come to their end"
            return reason, PARTNERLESS[reason][0]
        passed = self.stats.passed(info.key)
        if passed:
            peer, last = passed[-1]
            what = "held training for too long" if last is None else FAILED[last]
            more = f", as {len(passed) - 1} more are" if len(passed) > 1 else ""
            why = f"{_name(peer, others)} {what} before, and is passed over for a while{more}"
            return last or "timeout", why
        return "taken", PARTNERLESS["taken"][0]

    def rejected(self, updates: Sequence[RejectedUpdate]) -> None:
        """Note the contributions that were refused because they lay too far away, or for their
        loss.
        """
        members = self._directory.everyone() if updates else {}
        for update in updates:
            said = (
                f"refused what {_name(update.peer, members)} sent in round {update.key.round}: "
                f"{update}; if you trust all peers, set {update.unless}"
            )
            self._news.append(Notice("update", said))

    def refused(self, counts: Mapping[str, int]) -> None:
        """Note how many streams, calls and records of others were refused so far, by reason."""
        since = Counter(counts) - self._refused
        if since and self._said.due("refusals", SAY_REFUSED_S):
            self._refused = Counter(counts)
            said = f"refused from other peers since it was last said: {listed(since)}"
            self._news.append(Notice("refused", said))

    def apart(self, peers: Collection[str], members: Mapping[str, Member], gives_way: bool) -> None:
        """Note that the weights of ``peers`` differ from this node's; once for each event."""
        if not peers or not self._said.due(gives_way, SAY_AGAIN_S):
            return
        names = [_name(peer, members) for peer in sorted(peers)]
        them = f"{len(names)} other member{'s' if len(names) > 1 else ''} ({some(names)})"
        if gives_way:
            who = f"this node's weights differ from those of {them}, so it takes over theirs"
        else:
            who = f"the weights of {them} differ from this node's, and are to give way to them"
        said = (
            f"{who}; to load other weights on purpose, call opt.restart_from_model() on all members"
        )
        self._news.append(Notice("weights", said))

    def seconds(self) -> dict[str, float]:
        """Return the fields of `shoal.swarm.wire.record.Exchanges` that are recent seconds."""
        return {
            "exchange_s": self.stats.exchange_s(),
            "round_wait_s": sum(self._waits) / len(self._waits) if self._waits else 0.0,
        }

    def faults(self) -> dict[str, Any]:
        """Return the fields of `shoal.swarm.wire.record.Faults` about others and the network."""
        suspected = self.absence.suspected
        return {
            **self.stats.report(),
            "partnerless": self._partnerless,
            **(suspected.fields() if suspected is not None else {}),
        }

    def news(self) -> list[Notice]:
        """Return the notices that were not returned yet; looks for members that vanished at most
        once a second.
        """
        if self._said.due("look", LOOK_S):
            at = self._directory
            now = self._said.clock()
            for said in self.absence.look(at.everyone(), at.departed(), now, at.belongs):
                self._news.append(Notice("partition", said))
        self._news += [Notice("internal", sentence) for sentence in self.stats.errors.news()]
        return [self._news.popleft() for _ in range(len(self._news))]


def _name(peer: str, members: Mapping[str, Member]) -> str:
    return members[peer].name if peer in members else short(peer)


def _rounds(count: int) -> str:
    return "round" if count <= 1 else f"{count} rounds"
