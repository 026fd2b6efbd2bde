"""The protocol as a state machine without sockets, threads or a clock: signed records go in, duties
and rulings come out.

    consensus.advance(round)       a new round has begun: claims of it are taken from now on
    consensus.open(electorate)     verifiers are drawn for what was published in an earlier round
    consensus.take(signed)         a record came; Refused says why not, and is counted
    consensus.learn(signed)        a record from a peer's log: for rulings, not for marks
    consensus.duties(peer)         what ``peer`` has to do now (see `Voter`)
    consensus.ruling(claim)        what a quorum has settled

The records that a peer sees in time decide what it states as a verifier. Rulings and reputation
follow only from what a quorum stated, so late records of verifiers are kept too: refused as votes,
but there for others' rulings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shoal.verification.consensus.draws import Case, Draw, Times
from shoal.verification.consensus.ledger import Ledger
from shoal.verification.consensus.open_cases import Duty, OpenCases
from shoal.verification.consensus.planting import BEHIND
from shoal.verification.consensus.record_window import RecordWindow
from shoal.verification.consensus.records import (
    Claim,
    Commitment,
    Dispute,
    Entry,
    Opening,
    Refused,
    Reveal,
    Signed,
    Verdict,
    Verify,
    View,
    VoteRecord,
)
from shoal.verification.consensus.rulings import (
    Rules,
    Ruling,
    first_draws,
    is_plant,
    rule,
    second_draw,
)
from shoal.verification.consensus.sortition import OPENS, Electorate
from shoal.verification.consensus.waiting_list import WaitingList

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
"""Reasons of `Refused`."""
MAX_SAME = 2
"""Claims of one slot, or entries of one round, that are kept: two prove a contradiction."""
MAX_CONTRADICTIONS = 4
"""Different records of one peer that are kept where there should be one: enough for a proof."""


@dataclass(frozen=True)
class Limits:
    """Bounds on what a peer keeps."""

    claims: int = 256
    """Claims of one author in one round."""
    waiting: int = 16_384
    """Claims and appeals whose verifiers are not drawn yet."""
    strangers: int = 4096
    """Waiting claims and appeals of authors who could not be drawn themselves: fresh keys cost
    nothing.
    """
    peers: int = 16_384
    """Peers that have entered."""
    cases: int = 16_384
    """Claims and appeals at a time; the oldest that are decided or over make room."""


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
        self.rules = rules or Rules()
        self.times = times or Times()
        self.limits = limits or Limits()
        self.ledger = Ledger()
        self.electorates: dict[int, Electorate] = {}
        self.late: set[bytes] = set()
        """Ids of commitments that came when votes of their draw were shown."""
        self.counts: Counter[str] = Counter()
        self._window = RecordWindow(0, clock(), self.times.skew_s)
        self.views: Callable[[View], None] = lambda view: None
        self._run = run
        self._verify = verify
        self.now = clock
        self._banned = banned
        self._signatures: dict[bytes, bytes] = {}
        self._waiting = WaitingList(self.limits.waiting, self.limits.strangers)
        self.cases = OpenCases(self.limits.cases)

    @property
    def round(self) -> int:
        return self._window.round

    def advance(self, round: int, since: float | None = None) -> None:
        """Begin ``round``, at ``since`` (now if None), and forget cases against which nobody can
        appeal any more. Raises ValueError for an earlier round.
        """
        if round < self.round:
            raise ValueError(f"round {round} is before {self.round}")
        began = self.now() if since is None else since
        self._window = RecordWindow(round, began, self.times.skew_s)
        self.cases.forget(round - self.rules.appeal_rounds, self.now())

    def open(self, electorate: Electorate, begin: float | None = None) -> None:
        """Draw verifiers for all that was published in ``electorate.round``, `OPENS` rounds ago.

        First draws begin at ``begin``, by default ``skew_s`` from now: no vote is seen while any
        peer might still take claims of the round whose beacon these salts make. Raises ValueError
        if that is too early, or was done.
        """
        if electorate.round > self.round - OPENS or electorate.round in self.electorates:
            raise ValueError(
                f"round {electorate.round} cannot be opened in round {self.round}: it is too "
                "early, or was done"
            )
        self.electorates[electorate.round] = electorate
        self._waiting.end(electorate.round)
        if begin is None:
            begin = self.now() + self.times.skew_s
        for item in self.ledger.published(electorate.round):
            self._start(item, begin)

    def take(self, signed: Signed, at: float | None = None) -> None:
        """Take one record, which came ``at`` that time (now if None), and count it as accepted or
        under the reason of its refusal. Raises Refused.
        """
        try:
            self._take(signed, self.now() if at is None else at)
        except Refused as refused:
            self.counts[refused.reason] += 1
            raise
        finally:
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
        self.late = {key for key in self.late if key in self.ledger}
        self.cases.keep(ledger)

    def duties(self, peer: str) -> list[Duty]:
        """Return what ``peer`` has to do now, by case."""
        return self.cases.duties(peer, self.ledger, self.now())

    def ruling(self, claim: bytes) -> Ruling | None:
        """Return the ruling on the claim with this id, bans apart (`Table.rulings` heeds them);
        None if it is not known.
        """
        record = self.ledger.get(claim)
        if not isinstance(record, Claim):
            return None
        return rule(record, self.ledger, self.electorates, self.rules)

    # -- records -----------------------------------------------------------------------------------

    def _take(self, signed: Signed, came: float) -> None:
        record = signed.record
        if record.id in self.ledger:
            raise Refused("A record was refused: it was there before.", "replayed")
        if isinstance(record, Claim):
            # Before the signature, which costs most: only floods are refused here.
            self._check_number(record)
        if not self._is_signed(signed):
            raise Refused("A record was refused: its signature is not its author's.", "forged")
        # A banned peer may still finish what it was drawn for and open what it planted before.
        if isinstance(record, Claim | Entry | Dispute) and self._banned(record.peer):
            raise Refused("A record was refused: its author is banned.", "banned")
        if isinstance(record, Claim | Entry):
            self._take_published(record, came)
        elif isinstance(record, Dispute | Opening):
            self._take_appeal(record, came)
        elif isinstance(record, Commitment | Reveal | Verdict):
            self._take_ballot(record, came)
        elif isinstance(record, View):
            self._take_view(record)

    def _is_signed(self, signed: Signed) -> bool:
        return self._verify(signed.record.peer, signed.record.encoded, signed.signature)

    def _check_number(self, record: Claim | Entry) -> None:
        """Refuse a record that is one too many of its author in its round, or the entry of one peer
        too many.
        """
        if isinstance(record, Claim):
            others = self.ledger.claims_of(record.peer, record.round)
            same = sum(other.slot == record.slot for other in others)
            is_full = len(others) >= self.limits.claims
            if record.slot >= self.rules.claims or is_full or same >= MAX_SAME:
                raise Refused(
                    "A claim was refused: its author made too many in this round.", "quota"
                )
            return
        entries = self.ledger.entries_of(record.peer)
        if sum(entry.round == record.round for entry in entries) >= MAX_SAME:
            raise Refused("An entry was refused: its author made too many in this round.", "quota")
        if not entries and len(self.ledger.peers()) >= self.limits.peers:
            raise Refused("An entry was refused: too many peers have entered.", "overflow")

    def _take_published(self, record: Claim | Entry, came: float) -> None:
        if record.run != self._run:
            raise Refused(f"A {record.KIND} of another run was refused.", "foreign")
        self._window.check(record, came, is_opened=record.round in self.electorates)
        if isinstance(record, Claim):
            self._wait(record)
        else:
            self._check_number(record)
        self.ledger.add(record)

    def _take_view(self, record: View) -> None:
        if record.run != self._run:
            raise Refused("A view of another run was refused.", "foreign")
        self._window.check_view(record)
        voters = self._voters()
        stranger = voters is not None and record.peer not in voters
        if stranger and not self.ledger.entries_of(record.peer):
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
            return record.run == self._run and self._window.has_begun(record.round)
        if isinstance(record, Dispute | Opening):
            claim = self.ledger.get(record.claim)
            has_begun = self._window.has_begun(record.round)
            return isinstance(claim, Claim) and has_begun and not self._has_appealed(record)
        if isinstance(record, Commitment | Reveal | Verdict):
            ballots = self.ledger.ballots(type(record), record.case, record.attempt, record.peer)
            return self.ledger.stamp(record) >= 0 and len(ballots) < MAX_CONTRADICTIONS
        return False

    def _take_appeal(self, record: Dispute | Opening, came: float) -> None:
        self._window.check(record, came, is_opened=record.round in self.electorates)
        claim = self.ledger.get(record.claim)
        if not isinstance(claim, Claim) or claim.round not in self.electorates:
            raise Refused(
                f"A {record.KIND} was refused: no verifiers are drawn for its claim.", "unknown"
            )
        if not 0 <= record.round - claim.round <= self.rules.appeal_rounds:
            raise Refused(
                f"A {record.KIND} was refused: it comes too late after its claim.", "stale"
            )
        if self._has_appealed(record):
            raise Refused(f"A {record.KIND} was refused: its author appealed before.", "quota")
        if isinstance(record, Opening):
            planted = is_plant(record, claim, self.ledger, self.electorates, self.rules)
            if not planted:
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

    def _has_appealed(self, record: Dispute | Opening) -> bool:
        return any(other.peer == record.peer for other in self.ledger.appeals(record.claim))

    def _take_ballot(self, record: Commitment | Reveal | Verdict, came: float) -> None:
        case = self.cases.get(record.case)
        if case is None:
            raise Refused(f"A {record.KIND} for an unknown case was refused.", "unknown")
        draw = case.draws[record.attempt] if record.attempt < len(case.draws) else None
        if draw is None or record.peer not in draw.verifiers:
            raise Refused(f"A {record.KIND} was refused: its author was not drawn.", "not-drawn")
        earlier = self.ledger.ballots(type(record), record.case, record.attempt, record.peer)
        if len(earlier) >= MAX_CONTRADICTIONS:
            raise Refused(f"A {record.KIND} was refused: its author sent too many.", "quota")
        if isinstance(record, Verdict) and len(record.marks) != len(draw.verifiers):
            raise Refused("A verdict was refused: it has another number of verifiers.", "unfit")
        has_stated = bool(earlier)
        self.ledger.add(record)
        if isinstance(record, Commitment) and draw.shows_votes(came):
            self.late.add(record.id)
        if has_stated:
            draw.contradicted.add(record.peer)
            raise Refused(
                f"A second {record.KIND} was refused and kept as a proof against its author.",
                "contradiction",
            )
        if isinstance(record, Commitment | Reveal):
            self._note(draw, record, came)

    def _note(self, draw: Draw, record: Commitment | Reveal, came: float) -> None:
        """Note a ballot that came in time, for the marks that this peer states."""
        if isinstance(record, Commitment):
            if not draw.takes_commitments(came):
                raise Refused("A commitment came too late.", "late")
            draw.commitments[record.peer] = record
        else:
            if not draw.takes_reveals(came):
                raise Refused("A reveal came too late.", "late")
            draw.reveals[record.peer] = record
            commitment = draw.commitments.get(record.peer)
            if commitment is not None and not record.fits(commitment):
                raise Refused(
                    "A reveal was refused: it is not the vote that was committed to.", "unfit"
                )

    # -- cases -------------------------------------------------------------------------------------

    def _wait(self, item: Claim | Dispute | Opening) -> None:
        known = self._voters()
        self._waiting.add(item, is_strange=known is not None and item.peer not in known)

    def _voters(self) -> Mapping[str, str] | None:
        """Return who can be drawn, as far as is known; None before the first draw."""
        agreed = [round for round, electorate in self.electorates.items() if electorate.operators]
        if not agreed:
            return None
        return self.electorates[max(agreed)].operators

    def _start(self, item: Claim | Dispute | Opening, begin: float) -> None:
        """Begin the case of ``item``, if verifiers are drawn for it."""
        if isinstance(item, Claim):
            drawn = first_draws(item, self.electorates, self.rules)
            if drawn:
                self.cases.add(item.id, Case(item, None, self._draws(drawn, begin)))
            return
        claim = self.ledger.get(item.claim)
        if not isinstance(claim, Claim):
            return
        settled = rule(claim, self.ledger, self.electorates, self.rules)
        # One appeal is final; and an opening that agrees with the ruling asks for no draw.
        agrees = settled.outcome == "invalid" and isinstance(item, Opening)
        if settled.appeal is not None or agrees or self.cases.is_appealed(claim, self.now()):
            return
        verifiers = second_draw(item, claim, self.electorates, self.rules)
        if verifiers:
            self.cases.add(item.id, Case(claim, item, self._draws((verifiers,), begin)))

    def _draws(self, drawn: Sequence[tuple[str, ...]], begin: float) -> tuple[Draw, ...]:
        now = self.now()
        draws = []
        for number, verifiers in enumerate(drawn):
            starts = begin + self.times.total_s * number
            draws.append(Draw(verifiers, starts, self.times, watched=now <= starts))
        return tuple(draws)
