"""The protocol as a state machine without sockets, threads or a clock: signed records go in, duties
and rulings come out.

    consensus.advance(round)          a new round has begun: claims of it are taken from now on
    consensus.open(electorate)        the beacon of an earlier round is known: verifiers are drawn
                                      for what was published in it
    consensus.take(signed)            a record came; Refused says why not, and is counted
    consensus.learn(signed)           a record from another peer's log, whatever its time: for
                                      rulings, not for marks
    consensus.duties(peer)            what ``peer`` has to do now (see `Voter`)
    consensus.ruling(claim)           what a quorum has settled

The records that a peer sees in time decide what it states as a verifier. Rulings and reputation
follow only from what a quorum stated, so late records of verifiers are kept too: refused as votes,
but there for others' rulings.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shoal.verification.consensus.records import (
    BEHIND,
    OPENS,
    Claim,
    Commitment,
    Dispute,
    Duty,
    Electorate,
    Entry,
    Ledger,
    Limits,
    Mark,
    Opening,
    Refused,
    Reveal,
    Sign,
    Signed,
    Verdict,
    Verify,
    View,
    Vote,
    VoteRecord,
    hide,
)
from shoal.verification.consensus.rulings import (
    Rules,
    Ruling,
    decide,
    first_draws,
    is_plant,
    rule,
    second_draw,
)

# Timing of a case: the draws of verifiers for a claim or an appeal, and the state of each.
#
#     |-- commit_s --|-- skew_s --|-- reveal_s --|        the next draw, if this one decided nothing
#       commitments                 reveals
#
# A verifier reveals when all have committed, or ``skew_s`` after commitments are no longer taken,
# so that with clocks that are within ``skew_s`` of each other no vote is seen by anybody who could
# still commit. Times are seconds of the injected clock.


@dataclass(frozen=True)
class Times:
    """Durations of the phases of a draw, in seconds."""

    commit_s: float = 60.0
    """Time to fetch the output, check it, and commit to a vote."""
    skew_s: float = 5.0
    """Delay of gossip plus difference of clocks."""
    reveal_s: float = 15.0

    @property
    def total_s(self) -> float:
        return self.commit_s + self.skew_s + self.reveal_s

    @classmethod
    def of(cls, round_s: float) -> Times:
        """Divide a round of ``round_s`` seconds: three draws after three skews (see `ViewQuorum`)
        are 99 % of it.
        """
        return cls(commit_s=0.19 * round_s, skew_s=0.04 * round_s, reveal_s=0.06 * round_s)


@dataclass
class Draw:
    """Verifiers of one attempt and the records that came from them in time."""

    verifiers: tuple[str, ...]
    starts: float
    times: Times
    commitments: dict[str, Commitment] = field(default_factory=dict)
    reveals: dict[str, Reveal] = field(default_factory=dict)
    contradicted: set[str] = field(default_factory=set)
    watched: bool = True
    """False if this peer joined after the draw began: then it cannot say who was absent."""

    def takes_commitments(self, now: float) -> bool:
        return now < self.starts + self.times.commit_s

    def takes_reveals(self, now: float) -> bool:
        """Return whether a reveal is in time.

        An early one is kept and harms only its author, whose vote can be copied.
        """
        return now < self.starts + self.times.total_s

    def is_revealing(self, now: float) -> bool:
        all_in = len(self.commitments) == len(self.verifiers)
        return self.takes_reveals(now) and (
            all_in or now >= self.starts + self.times.commit_s + self.times.skew_s
        )

    def is_over(self, now: float) -> bool:
        """Return whether the marks are final: time is up, or all votes are there."""
        return not self.takes_reveals(now) or all(
            mark in ("valid", "invalid") for mark in self.marks()
        )

    def marks(self) -> tuple[Mark, ...]:
        return tuple(map(self._mark, self.verifiers))

    def _mark(self, peer: str) -> Mark:
        commitment, reveal = self.commitments.get(peer), self.reveals.get(peer)
        if commitment is None:
            return "absent"
        if reveal is None or peer in self.contradicted or not reveal.fits(commitment):
            return "withheld"
        return reveal.vote


@dataclass
class Case:
    """The draws for ``claim``, or for ``appeal`` against its ruling."""

    claim: Claim
    appeal: Dispute | Opening | None
    draws: tuple[Draw, ...]
    _last: int | None = None  # the draw that was under way when voting ended

    def current(self, now: float) -> int:
        """Return the number of the draw that is under way, or of the last one."""
        if self._last is not None:
            return self._last
        number = 0
        while (
            number + 1 < len(self.draws)
            and self.draws[number].is_over(now)
            and decide(self.draws[number].marks()) is None
        ):
            number += 1
        if self.draws[number].is_over(now):  # and it decided something, or is the last
            self._last = number
        return number

    def is_over(self, now: float) -> bool:
        self.current(now)
        return self._last is not None


REASONS = (
    "forged",
    "foreign",
    "banned",
    "replayed",
    "future",
    "stale",
    "late",
    "unknown",
    "not-drawn",
    "contradiction",
    "unfit",
    "quota",
    "overflow",
)
# claims of one slot, entries of one round: two are the proof that their author contradicts itself
TWICE = 2
MOST = 4  # different records of one peer where there should be one: enough for a proof


class Consensus:
    """One peer's view of a run.

    ``clock``: monotonic seconds; ``banned`` says whose records to ignore (`Table.is_banned`).
    """

    def __init__(
        self,
        run: str,
        verify: Verify,
        clock: Callable[[], float],
        *,
        rules: Rules | None = None,
        times: Times | None = None,
        limits: Limits | None = None,
        banned: Callable[[str], bool] = lambda peer: False,
    ) -> None:
        self.rules, self.times, self.limits = rules or Rules(), times or Times(), limits or Limits()
        self.ledger = Ledger()
        self.electorates: dict[int, Electorate] = {}
        self.counts: Counter[str] = Counter()
        self.round, self._since = 0, clock()
        self.views: Callable[[View], None] = lambda view: None
        self._run, self._verify, self._clock, self._banned = run, verify, clock, banned
        self._signatures: dict[bytes, bytes] = {}
        self._at: float | None = None
        self._waiting: dict[bytes, Claim | Dispute | Opening] = {}
        self._strange: set[bytes] = set()  # the waiting ones whose authors are strangers
        self._cases: dict[bytes, Case] = {}
        self._drawn: defaultdict[str, dict[bytes, tuple[Case, int]]] = defaultdict(
            dict
        )  # verifiers with something to do

    def advance(self, round: int, since: float | None = None) -> None:
        """Begin ``round``, at ``since`` (now if None), and forget cases against which nobody can
        appeal any more. Raises ValueError for an earlier round.
        """
        if round < self.round:
            raise ValueError(f"round {round} is before {self.round}")
        self.round, self._since = round, self.now() if since is None else since
        for key, case in list(self._cases.items()):
            if (
                case.appeal or case.claim
            ).round < round - self.rules.appeal_rounds and case.is_over(self.now()):
                del self._cases[key]
        self._drop_duties()

    def open(self, electorate: Electorate, begin: float | None = None) -> None:
        """Draw verifiers for all that was published in ``electorate.round``, `OPENS` rounds ago.

        First draws begin at ``begin``, by
        default ``skew_s`` from now: no vote is seen while any peer might still take claims of the
        round whose beacon these salts make. Raises ValueError if that is too early, or was done.
        """
        if electorate.round > self.round - OPENS or electorate.round in self.electorates:
            raise ValueError(
                f"round {electorate.round} cannot be opened in round {self.round}: it is too "
                "early, or was done"
            )
        self.electorates[electorate.round] = electorate
        for item in [item for item in self._waiting.values() if item.round <= electorate.round]:
            del self._waiting[item.id]
            self._strange.discard(item.id)
        for item in self.ledger.published(electorate.round):
            self._start(item, self.now() + self.times.skew_s if begin is None else begin)

    def take(self, signed: Signed, at: float | None = None) -> None:
        """Take one record, which came ``at`` that time (now if None), and count it as accepted or
        under the reason of its refusal. Raises Refused.
        """
        self._at = at
        try:
            self._take(signed)
        except Refused as refused:
            self.counts[refused.reason] += 1
            raise
        finally:
            self._at = None
            if signed.record.id in self.ledger:
                self._signatures.setdefault(signed.record.id, signed.signature)
        self.counts["accepted"] += 1

    def learn(self, signed: Signed) -> bool:
        """Add a record that another peer has kept, whatever its time; return False if it was there,
        is of another run or out of bounds. It makes no marks, and duties only if its draw is still
        to come.
        """
        record = signed.record
        if record.id in self.ledger or not self._may_keep(record) or not self._is_signed(signed):
            return False
        self.ledger.add(record)
        self._signatures[record.id] = signed.signature
        return True

    def signed(self, record: VoteRecord) -> Signed:
        """Return a record of the ledger with its signature. Raises KeyError if it is not there."""
        return Signed(record, self._signatures[record.id])

    def forget(self, before: int) -> None:
        """Drop what was published in rounds before ``before``, and electorates that nothing depends
        on any more.
        """
        self.keep(self.ledger.newer(before, self.rules.life + BEHIND))
        for round in [round for round in self.electorates if round < before - BEHIND]:
            del self.electorates[round]

    def keep(self, ledger: Ledger) -> None:
        """Continue with ``ledger``, a part of the present one."""
        self.ledger = ledger
        self._signatures = {
            key: value for key, value in self._signatures.items() if key in self.ledger
        }
        for key in [key for key in self._cases if key not in self.ledger]:
            del self._cases[key]
        self._drop_duties()

    def _drop_duties(self) -> None:
        """Drop those of cases that are gone: only a peer's own are asked for, and dropped by
        `duties`.
        """
        left = {
            peer: {key: due for key, due in cases.items() if key in self._cases}
            for peer, cases in self._drawn.items()
        }
        self._drawn = defaultdict(dict, {peer: cases for peer, cases in left.items() if cases})

    def duties(self, peer: str) -> list[Duty]:
        """Return what ``peer`` has to do now, by case."""
        now, found = self.now(), []
        for key, (case, attempt) in list(self._drawn[peer].items()):
            draw, current = case.draws[attempt], case.current(now)
            stated = bool(self.ledger.ballots(Verdict, key, attempt, peer))
            if stated or key not in self._cases or (attempt > current and case.is_over(now)):
                del self._drawn[peer][key]
                continue
            if attempt > current:
                continue
            committed = peer in draw.commitments
            if not committed and now >= draw.starts and draw.takes_commitments(now):
                until = draw.starts + draw.times.commit_s
                found.append(Duty("check", key, attempt, case.claim, until=until))
            elif committed and peer not in draw.reveals and draw.is_revealing(now):
                found.append(Duty("reveal", key, attempt, case.claim))
            elif draw.is_over(now):
                found.append(Duty("state", key, attempt, case.claim, draw.marks()))
        return found

    def ruling(self, claim: bytes) -> Ruling | None:
        """Return the ruling on the claim with this id, bans apart (`Table.rulings` heeds them);
        None if it is not known.
        """
        record = self.ledger.get(claim)
        return (
            rule(record, self.ledger, self.electorates, self.rules)
            if isinstance(record, Claim)
            else None
        )

    # -- records -----------------------------------------------------------------------------------

    def _take(self, signed: Signed) -> None:
        record = signed.record
        if record.id in self.ledger:
            raise Refused("A record was refused: it was there before.", "replayed")
        if isinstance(record, Claim):
            self._check_number(
                record
            )  # before the signature, which costs most: only floods are refused here
        if not self._is_signed(signed):
            raise Refused("A record was refused: its signature is not its author's.", "forged")
        # A banned peer may still finish what it was drawn for and open what it planted before.
        if isinstance(record, Claim | Entry | Dispute) and self._banned(record.peer):
            raise Refused("A record was refused: its author is banned.", "banned")
        if isinstance(record, Claim | Entry):
            self._take_published(record)
        elif isinstance(record, Dispute | Opening):
            self._take_appeal(record)
        elif isinstance(record, Commitment | Reveal | Verdict):
            self._take_ballot(record)
        elif isinstance(record, View):
            self._take_view(record)

    def _is_signed(self, signed: Signed) -> bool:
        return self._verify(signed.record.peer, signed.record.encoded, signed.signature)

    def now(self) -> float:
        """Return the time of the clock, or that at which the record being taken came."""
        return self._clock() if self._at is None else self._at

    def _check_number(self, record: Claim | Entry) -> None:
        """Refuse a record that is one too many of its author in its round, or the entry of one peer
        too many.
        """
        if isinstance(record, Claim):
            others = self.ledger.claims_of(record.peer, record.round)
            same, most = (
                sum(other.slot == record.slot for other in others),
                len(others) >= self.limits.claims,
            )
            if record.slot >= self.rules.claims or most or same >= TWICE:
                raise Refused(
                    "A claim was refused: its author made too many in this round.", "quota"
                )
            return
        entries = self.ledger.entries_of(record.peer)
        if sum(entry.round == record.round for entry in entries) >= TWICE:
            raise Refused("An entry was refused: its author made too many in this round.", "quota")
        if not entries and len(self.ledger.peers()) >= self.limits.peers:
            raise Refused("An entry was refused: too many peers have entered.", "overflow")

    def _take_published(self, record: Claim | Entry) -> None:
        if record.run != self._run:
            raise Refused(f"A {record.KIND} of another run was refused.", "foreign")
        self._check_round(record.KIND, record.round)
        if isinstance(record, Claim):
            self._wait(record)
        else:
            self._check_number(record)
        self.ledger.add(record)

    def _take_view(self, record: View) -> None:
        if record.run != self._run:
            raise Refused("A view of another run was refused.", "foreign")
        if record.round > self.round - OPENS + 1:
            raise Refused("A view was refused: its round has not begun.", "future")
        if record.round < self.round - OPENS:
            raise Refused("A view was refused: its round is over.", "late")
        voters = self._voters()
        if (
            voters is not None
            and record.peer not in voters
            and not self.ledger.entries_of(record.peer)
        ):
            raise Refused("A view was refused: its author has not entered.", "unknown")
        try:
            self.views(record)
        except ValueError as error:
            raise Refused(f"A view was refused: {error}.", "contradiction") from error

    def _may_keep(self, record: VoteRecord) -> bool:
        """Return whether a record from a log is of this run and within the bounds."""
        if isinstance(record, Claim | Entry):
            try:
                self._check_number(record)
            except Refused:
                return False
            return record.run == self._run and record.round <= self.round + 1
        if isinstance(record, Dispute | Opening):
            claim = self.ledger.get(record.claim)
            appealed = any(
                appeal.peer == record.peer for appeal in self.ledger.appeals(record.claim)
            )
            return isinstance(claim, Claim) and record.round <= self.round + 1 and not appealed
        if isinstance(record, Commitment | Reveal | Verdict):
            ballots = self.ledger.ballots(type(record), record.case, record.attempt, record.peer)
            return self.ledger.stamp(record) >= 0 and len(ballots) < MOST
        return False

    def _take_appeal(self, record: Dispute | Opening) -> None:
        self._check_round(record.KIND, record.round)
        claim = self.ledger.get(record.claim)
        if not isinstance(claim, Claim) or claim.round not in self.electorates:
            raise Refused(
                f"A {record.KIND} was refused: no verifiers are drawn for its claim.", "unknown"
            )
        if not 0 <= record.round - claim.round <= self.rules.appeal_rounds:
            raise Refused(
                f"A {record.KIND} was refused: it comes too late after its claim.", "stale"
            )
        if any(other.peer == record.peer for other in self.ledger.appeals(claim.id)):
            raise Refused(f"A {record.KIND} was refused: its author appealed before.", "quota")
        if isinstance(record, Opening) and not is_plant(
            record, claim, self.ledger, self.electorates, self.rules
        ):
            raise Refused("An opening was refused: its claim was not to be planted.", "unfit")
        if rule(claim, self.ledger, self.electorates, self.rules).outcome == "unverified":
            raise Refused(
                f"A {record.KIND} was refused: nothing is decided about its claim.", "unknown"
            )
        if record.peer != claim.peer and record.peer not in (self._voters() or ()):
            raise Refused(
                "A dispute was refused: its author could not be drawn itself.", "not-drawn"
            )
        self._wait(record)
        self.ledger.add(record)

    def _take_ballot(self, record: Commitment | Reveal | Verdict) -> None:
        case = self._cases.get(record.case)
        if case is None:
            raise Refused(f"A {record.KIND} for an unknown case was refused.", "unknown")
        if (
            record.attempt >= len(case.draws)
            or record.peer not in case.draws[record.attempt].verifiers
        ):
            raise Refused(f"A {record.KIND} was refused: its author was not drawn.", "not-drawn")
        if len(self.ledger.ballots(type(record), record.case, record.attempt, record.peer)) >= MOST:
            raise Refused(f"A {record.KIND} was refused: its author sent too many.", "quota")
        draw = case.draws[record.attempt]
        if isinstance(record, Verdict) and len(record.marks) != len(draw.verifiers):
            raise Refused("A verdict was refused: it has another number of verifiers.", "unfit")
        earlier = bool(self.ledger.ballots(type(record), record.case, record.attempt, record.peer))
        self.ledger.add(record)
        if earlier:
            draw.contradicted.add(record.peer)
            raise Refused(
                f"A second {record.KIND} was refused and kept as a proof against its author.",
                "contradiction",
            )
        if isinstance(record, Commitment | Reveal):
            self._note(draw, record)

    def _note(self, draw: Draw, record: Commitment | Reveal) -> None:
        """Note a ballot that came in time, for the marks that this peer states."""
        now = self.now()
        if isinstance(record, Commitment):
            if not draw.takes_commitments(now):
                raise Refused("A commitment came too late.", "late")
            draw.commitments[record.peer] = record
        else:
            if not draw.takes_reveals(now):
                raise Refused("A reveal came too late.", "late")
            draw.reveals[record.peer] = record
            commitment = draw.commitments.get(record.peer)
            if commitment is not None and not record.fits(commitment):
                raise Refused(
                    "A reveal was refused: it is not the vote that was committed to.", "unfit"
                )

    def _check_round(self, kind: str, round: int) -> None:
        """Refuse a claim, an entry or an appeal of another round, but for those that a neighbour's
        clock explains.
        """
        if round > self.round + 1:
            raise Refused(f"A {kind} was refused: its round has not begun.", "future")
        if (
            round == self.round - 1
            and self.now() < self._since + self.times.skew_s
            and round not in self.electorates
        ):
            return
        if round < self.round:
            raise Refused(f"A {kind} was refused: its round is over.", "late")

    # -- cases -------------------------------------------------------------------------------------

    def _wait(self, item: Claim | Dispute | Opening) -> None:
        known = self._voters()
        strange = known is not None and item.peer not in known
        if len(self._waiting) >= self.limits.waiting or (
            strange and len(self._strange) >= self.limits.strangers
        ):
            raise Refused(f"A {item.KIND} was refused: too many wait for their draw.", "overflow")
        self._waiting[item.id] = item
        if strange:
            self._strange.add(item.id)

    def _voters(self) -> Mapping[str, str] | None:
        """Return who can be drawn, as far as is known; None before the first draw."""
        agreed = [round for round, electorate in self.electorates.items() if electorate.operators]
        return self.electorates[max(agreed)].operators if agreed else None

    def _start(self, item: Claim | Dispute | Opening, begin: float) -> None:
        if isinstance(item, Claim):
            claim, appeal, drawn = item, None, first_draws(item, self.electorates, self.rules)
        else:
            found = self.ledger.get(item.claim)
            if not isinstance(found, Claim):
                return
            claim, appeal, settled = (
                found,
                item,
                rule(found, self.ledger, self.electorates, self.rules),
            )
            # One appeal is final; and an opening that agrees with the ruling asks for no draw.
            agrees = settled.outcome == "invalid" and isinstance(item, Opening)
            if settled.appeal is not None or agrees or self._is_appealed(claim):
                return
            verifiers = second_draw(item, claim, self.electorates, self.rules)
            drawn = (verifiers,) if verifiers else ()
        if drawn:
            while (
                len(self._cases) >= self.limits.cases
            ):  # of the oldest no vote is taken any more; the ledger keeps the earlier ones
                del self._cases[next(iter(self._cases))]
            now, starts = (
                self.now(),
                [begin + self.times.total_s * number for number in range(len(drawn))],
            )
            draws = tuple(
                Draw(seats, at, self.times, watched=now <= at)
                for seats, at in zip(drawn, starts, strict=True)
            )
            case = self._cases[item.id] = Case(claim, appeal, draws)
            for attempt, draw in enumerate(draws):
                for peer in draw.verifiers if draw.watched else ():
                    self._drawn[peer][item.id] = case, attempt

    def _is_appealed(self, claim: Claim) -> bool:
        now = self.now()
        return any(
            case.appeal and case.claim.id == claim.id and not case.draws[0].is_over(now)
            for case in self._cases.values()
        )


MAX_VOTES = 4096  # hidden votes that wait to be revealed


@dataclass(frozen=True)
class Checked:
    """Vote and at most 512 bytes of what was measured."""

    vote: Vote
    evidence: bytes = b""


Check = Callable[[Claim], Checked | None]
"""Verifies a claim; None abstains, because the budget is spent or the output cannot be had."""


class Voter:
    """``peer`` as a verifier: it turns duties in ``consensus`` into signed records.

    ``publish`` spreads a record soon, and never
    waits; it may come back to this peer. ``salt``: 32 fresh secret bytes with each call, which also
    feed the next beacon.
    """

    def __init__(
        self,
        peer: str,
        consensus: Consensus,
        publish: Callable[[Signed], None],
        sign: Sign,
        check: Check,
        salt: Callable[[], bytes],
    ) -> None:
        self.peer, self.consensus = peer, consensus
        self._publish, self._sign, self._check, self._salt = publish, sign, check, salt
        self._hidden: dict[tuple[bytes, int], Reveal] = {}
        self._left: set[tuple[bytes, int]] = set()
        self._takes = 0.0  # seconds that a check is expected to take

    def publish(self, record: VoteRecord) -> None:
        """Sign, take and spread a record of this peer.

        Raises Refused if the own consensus refuses it; then it is not sent.
        """
        signed = Signed.by(self._sign, record)
        self.consensus.take(signed)
        self._publish(signed)

    def try_publish(self, record: VoteRecord) -> bool:
        """Publish; return False if the own consensus refuses the record, as after a long check: it
        has counted that.
        """
        try:
            self.publish(record)
        except Refused:
            return False
        return True

    def reveal(self) -> None:
        """Reveal every vote that waits, before leaving: one that never comes costs its author; an
        early one can only be copied.
        """
        for reveal in self._hidden.values():
            self.try_publish(reveal)
        self._hidden.clear()

    def work(self, most: int = 1) -> int:
        """Do what is due, first what others wait for; check at most ``most`` claims, which costs.

        Returns how many.
        """
        if len(self._left) > MAX_VOTES:
            self._left.clear()
        self._publish_due()
        checked = 0
        for duty in self.consensus.duties(self.peer):
            key = (duty.case, duty.attempt)
            if duty.what != "check" or key in self._hidden or key in self._left:
                continue
            if checked >= most:
                break
            if self.consensus.now() + self._takes >= duty.until:
                self._left.add(
                    key
                )  # it would end too late, and keep this peer from revealing other votes in time
                self._takes *= 0.75  # one slow check must not keep it from trying again
                continue
            checked += 1
            self._commit(key, duty.claim)
        if checked:
            self._publish_due()
        return checked

    def _publish_due(self) -> None:
        for duty in self.consensus.duties(self.peer):
            key = (duty.case, duty.attempt)
            if duty.what == "reveal" and key in self._hidden:
                self.try_publish(self._hidden.pop(key))
            elif duty.what == "state":
                self._hidden.pop(key, None)
                self._left.discard(key)
                self.try_publish(
                    Verdict(peer=self.peer, case=duty.case, attempt=duty.attempt, marks=duty.marks)
                )

    def _commit(self, key: tuple[bytes, int], claim: Claim) -> None:
        before = self.consensus.now()
        checked = self._check(claim)
        self._takes = min(
            self.consensus.now() - before, self.consensus.times.commit_s
        )  # more is sleep, or a clock set forward
        if checked is None or len(self._hidden) >= MAX_VOTES:
            self._left.add(key)
            return
        reveal = Reveal(
            peer=self.peer,
            case=key[0],
            attempt=key[1],
            vote=checked.vote,
            evidence=checked.evidence,
            salt=self._salt(),
        )
        if self.try_publish(
            Commitment(peer=self.peer, case=key[0], attempt=key[1], digest=hide(reveal))
        ):
            self._hidden[key] = reveal
        else:
            self._left.add(key)
