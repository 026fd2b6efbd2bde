"""One peer's whole part in the vote: entering, claiming, planting, voting, scoring; no I/O and no
clock of its own.

    participant.tick()             do what is due; may take as long as a check takes
    participant.take(signed)       take a record that came by gossip
    participant.slots()            claims to be made now; participant.claim(claim) publishes one
    participant.wanted             whose log to pull now; participant.learn(log) takes it in
    participant.log(since)         the own log
    participant.table              everybody's scores; whoever is banned by it is left out

Rounds are Unix time over ``round_s``, so nobody leads and a wrong clock shows; `view_quorum` and
`sortition` give the timetable. Records of rounds against which nobody can appeal any more are
forgotten; their consequences live on in a base table.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from shoal.verification.consensus.electorate import electorate, root, void
from shoal.verification.consensus.ledger import Ledger
from shoal.verification.consensus.log import EMPTY, MOST_PAIRS, Log, is_stale, pairs_to_draw
from shoal.verification.consensus.planting import BEHIND, Chain, must_plant
from shoal.verification.consensus.protocol import Consensus, Limits
from shoal.verification.consensus.records import (
    Claim,
    Dispute,
    Entry,
    Opening,
    Refused,
    Sign,
    Signed,
    Verify,
    View,
)
from shoal.verification.consensus.reputation import ScoreRules, Table, compute_scores
from shoal.verification.consensus.round_clock import RoundClock
from shoal.verification.consensus.rulings import Rules, anchored
from shoal.verification.consensus.sortition import OPENS, SETTLED, Electorate
from shoal.verification.consensus.view_quorum import ViewQuorum
from shoal.verification.consensus.voter import Check, Voter

MAX_PULLS = 3
"""Logs taken in for one round, at most."""
ORDER_IN_LOG = ("entry", "claim", "dispute", "opening", "commitment", "reveal", "verdict")
"""Order of the records of one round in a log: what others depend on comes first."""


@dataclass(frozen=True)
class Slot:
    """Claim to be made; if ``planted``, the lottery demands that it is wrong."""

    round: int
    slot: int
    planted: bool


@dataclass(frozen=True)
class Wanted:
    """Request to pull the log of one of ``peers`` (best first) since round ``since``, soon: draws
    wait for it.
    """

    peers: tuple[str, ...]
    since: int


@dataclass
class RoundProgress:
    """What this peer has done in the round that is on."""

    has_begun: bool = False
    has_stated: bool = False
    """Its view; also True if it joined too late in the round to state one."""
    pulled: int = 0
    """Logs taken in."""


class Participant:
    """State machine of ``peer`` in ``run``.

    ``operator``: who runs it. ``publish`` spreads a record and never waits. ``clock``: Unix
    seconds; if it goes back the participant waits. ``salt``: 32 fresh secret bytes with each call.
    """

    def __init__(
        self,
        peer: str,
        run: str,
        *,
        operator: str,
        sign: Sign,
        verify: Verify,
        publish: Callable[[Signed], None],
        check: Check,
        clock: Callable[[], float],
        salt: Callable[[], bytes],
        rules: Rules,
        prices: ScoreRules,
        round_s: float,
        limits: Limits | None = None,
    ) -> None:
        self.peer = peer
        self.run = run
        self.operator = operator
        self.rules = rules
        self.prices = prices
        self.clock = RoundClock(clock, round_s)
        self._sign = sign
        self.round = self.clock.round()
        self._came = self.round
        self.base = EMPTY
        self.table = EMPTY
        self.consensus = Consensus(
            run,
            verify,
            self.clock.now,
            rules=rules,
            times=self.clock.times,
            limits=limits,
            banned=lambda peer: self.table.is_banned(peer, self.round),
        )
        self.consensus.views = self._view
        self.member = Voter(peer, self.consensus, publish, sign, check, salt)
        self._agreements: dict[int, ViewQuorum] = {}
        self.consensus.advance(self.round, self.clock.at(self.round))
        # A peer that joins while views of the round are out has missed some: it states none until
        # the next.
        views_are_out = self.clock.now() > self.clock.at(self.round, skews=1)
        self._progress = RoundProgress(has_stated=views_are_out)

    def tick(self, most: int = 1) -> int:
        """Do what is due; check at most ``most`` claims, which is what costs.

        Returns how many were checked.
        """
        round = self.clock.round()
        now = self.clock.now()
        if round > self.round or not self._progress.has_begun:
            self._begin(round)
        if not self._progress.has_stated and now >= self.clock.at(self.round, skews=1):
            self._state()
        if now >= self.clock.at(self.round, skews=2):
            self._open(final=now >= self.clock.at(self.round, skews=3))
        return self.member.work(most)

    def take(self, signed: Signed, at: float | None = None) -> None:
        """Take a record that came ``at`` that Unix time, by default now; it matters if records wait
        for a check. Raises Refused.
        """
        self.consensus.take(signed, at)

    def slots(self) -> list[Slot]:
        """Return the claims to make in this round: none while banned, or until the own entry is old
        enough and draws are agreed.
        """
        before = self.consensus.electorates.get(self.round - BEHIND)
        link = self._link(self.round)
        if before is None or not before.operators or link is None:
            return []
        if self.table.is_banned(self.peer, self.round):
            return []
        used = {claim.slot for claim in self.consensus.ledger.claims_of(self.peer, self.round)}
        slots = []
        for slot in range(self.rules.claims):
            if slot not in used:
                planted = must_plant(link, before.beacon, slot, self.rules.planted)
                slots.append(Slot(self.round, slot, planted))
        return slots

    def claim(self, claim: Claim) -> None:
        """Publish ``claim`` for one of `slots`.

        Raises Refused, for example if its round is over; then it is not sent.
        """
        if claim.peer != self.peer or claim.run != self.run:
            raise ValueError("a participant publishes its own claims only")
        if (claim.round, claim.slot) not in {(slot.round, slot.slot) for slot in self.slots()}:
            raise Refused(
                "A claim was not made: its round is over, or its slot is not free.", "late"
            )
        self.member.publish(claim)

    @property
    def wanted(self) -> Wanted | None:
        """Peers whose log to pull now; mostly None."""
        agreement = self._agreements.get(self.round - OPENS)
        views_in = self.clock.now() >= self.clock.at(self.round, skews=2)
        if agreement is None or not views_in or not self._progress.has_stated:
            return None
        peers = agreement.sources() if self._progress.pulled < MAX_PULLS else ()
        if not peers:
            return None
        at = self._progress.pulled % len(peers)
        return Wanted(peers[at:] + peers[:at], self._oldest())

    def learn(self, log: Log) -> int:
        """Take in another peer's log; return how many records were new.

        Its electorates and base count only if they match the views, or are settled and give the
        table that does; otherwise only the signed records are used.
        """
        self._progress.pulled += 1
        agreement = self._agreements.get(self.round - OPENS)
        new = 0
        for signed in log.records:
            spare = self.rules.life + BEHIND if isinstance(signed.record, Entry) else 0
            if self.consensus.ledger.stamp(signed.record) >= self._oldest() - spare:
                new += self.consensus.learn(signed)
        if agreement is not None:
            for other in log.electorates:
                agreement.learned(other)
            self._adopt(log, agreement)
        if self.table.is_banned(self.peer, self.round):
            self._drop_entry()
        return new

    def log(self, since: int) -> Log:
        """Return the log to share: base, electorates, and the records since round ``since``, newest
        first.
        """
        ledger = self.consensus.ledger
        kept = []
        for record in ledger:
            if isinstance(record, Entry) or ledger.stamp(record) >= max(since, 0):
                kept.append(record)
        kept.sort(
            key=lambda record: (-ledger.stamp(record), ORDER_IN_LOG.index(record.KIND), record.id)
        )
        known = dict(self.consensus.electorates)
        agreement = self._agreements.get(self.round - OPENS)
        if agreement is not None and agreement.proposed is not None:
            known.setdefault(agreement.round, agreement.electorate or agreement.proposed)
        electorates = tuple(known[round] for round in sorted(known))
        return Log(self.base, electorates, tuple(map(self.consensus.signed, kept)))

    # -- rounds ------------------------------------------------------------------------------------

    def _oldest(self) -> int:
        return max(self.base.round + 1, self.round - self.rules.kept_rounds)

    def _begin(self, round: int) -> None:
        """Do what is due when ``round`` begins; rounds during which the process slept are left
        out.
        """
        if round > self.round:
            self._open(final=True)
            self._progress = RoundProgress()
        self.round = round
        # Logs that were taken in before the first tick do not count.
        self._progress.pulled = 0
        self._progress.has_begun = True
        self.consensus.advance(round, self.clock.at(round))
        for old in list(self._agreements):
            if old < round - OPENS:
                del self._agreements[old]
        self._enter()
        self._appeal()

    def _enter(self) -> None:
        entries = self.consensus.ledger.entries_of(self.peer)
        fresh = any(self.round - entry.round < self.rules.life // 2 for entry in entries)
        if fresh or self.table.is_banned(self.peer, self.round):
            return
        entry = Entry(
            peer=self.peer,
            run=self.run,
            round=self.round,
            operator=self.operator,
            anchor=self._chain(self.round).anchor,
        )
        self.member.try_publish(entry)

    def _drop_entry(self) -> None:
        """Drop the entry that was made before the own ban was known: the others refused it."""
        ledger = self.consensus.ledger
        refused = [entry for entry in ledger.entries_of(self.peer) if entry.round >= self.round - 1]
        self.consensus.keep(Ledger(record for record in ledger if record not in refused))

    def _chain(self, round: int) -> Chain:
        """Return the chain of the entry of ``round``: always the same, so that a node that was
        started again can open what it planted before. Only the holder of the key can compute it,
        and no record begins like what is signed here.
        """
        secret = self._sign(b"shoal/verification/1/secret\x00" + f"{self.run} {round}".encode())
        return Chain(hashlib.sha256(secret).digest(), round, self.rules.life + BEHIND)

    def _link(self, round: int) -> bytes | None:
        """Return the link of ``round`` in the own chain that counts then; None if there is none, or
        its entry has another chain.
        """
        entry = anchored(self.consensus.ledger, self.peer, round, self.rules)
        if entry is None:
            return None
        chain = self._chain(entry.round)
        return chain.link(round) if chain.anchor == entry.anchor else None

    def _appeal(self) -> None:
        """Open planted claims once all claims of their round are settled, and dispute others that
        are rejected, as by colluders drawn together. By the records alone, so also after a restart;
        but who was away when it was checked, with its evidence, was rejected rightly.
        """
        known = self.consensus
        oldest = max(self.round - self.rules.appeal_rounds, 0)
        for round in range(oldest, self.round - SETTLED + 2):
            link = self._link(round)
            before = known.electorates.get(round - BEHIND)
            if link is None or before is None:
                continue
            for claim in known.ledger.claims_of(self.peer, round):
                planted = must_plant(link, before.beacon, claim.slot, self.rules.planted)
                self._appeal_for(claim, link if planted else None)

    def _appeal_for(self, claim: Claim, link: bytes | None) -> None:
        """Open ``claim`` with the ``link`` that planted it, or dispute its rejection."""
        known = self.consensus
        ruling = known.ruling(claim.id)
        appealed = any(appeal.peer == self.peer for appeal in known.ledger.appeals(claim.id))
        if appealed or ruling is None or ruling.outcome == "unverified":
            return
        attempt = len(ruling.trials) - 1
        if ruling.appeal is not None:
            attempt -= 1
        rejected = ruling.outcome == "invalid" and ruling.appeal is None
        if link is not None:
            opening = Opening(
                peer=self.peer, round=self.round, claim=claim.id, attempt=attempt, link=link
            )
            self.member.try_publish(opening)
        elif rejected and claim.round + OPENS > self._came:
            dispute = Dispute(peer=self.peer, round=self.round, claim=claim.id, attempt=attempt)
            self.member.try_publish(dispute)

    def _state(self) -> None:
        """Compute the scores, and publish this peer's view of the electorate that is due."""
        self._progress.has_stated = True
        round = self.round - OPENS
        known = self.consensus
        if round < 0:
            return
        self._forget()
        self.table = self._compute_table(known.ledger, self.base, known.electorates)
        own = self._own_electorate(round, self.table)
        view = View(
            peer=self.peer, run=self.run, round=round, root=root(own), table=self.table.digest
        )
        agreement = self._agreements.setdefault(round, ViewQuorum(round))
        agreement.propose(view, own, self._voters_before(round, own) or None)
        self.member.try_publish(view)

    def _voters_before(self, round: int, own: Electorate) -> set[str]:
        """Return who could vote in the last round that agreed on it, and still can."""
        for earlier in range(round - 1, round - self.rules.life - 1, -1):
            known = self.consensus.electorates.get(earlier)
            if known is not None and known.operators:
                return set(known.operators) & set(own.operators)
        return set()

    def _forget(self) -> None:
        known = self.consensus
        before = self.round - self.rules.kept_rounds
        if before > 0 and self.base.round < before - 1:
            self.base = compute_scores(
                known.ledger, known.electorates, self.rules, self.prices, before - 1, self.base
            ).base()
            known.forget(before)

    def _compute_table(
        self, ledger: Ledger, base: Table, electorates: dict[int, Electorate]
    ) -> Table:
        settled = max(self.round - SETTLED, base.round)
        return compute_scores(ledger, electorates, self.rules, self.prices, settled, base)

    def _open(self, final: bool) -> None:
        """Open the draws of the agreed electorate, also if it is learned late; nobody is drawn if
        there is no agreement.
        """
        round = self.round - OPENS
        agreement = self._agreements.get(round)
        if agreement is None or agreement.proposed is None or round in self.consensus.electorates:
            return
        found = agreement.electorate
        if found is None and final and agreement.root is None:
            found = void(self.run, round)
        if found is not None:
            self.consensus.open(found, self.clock.at(round + OPENS, skews=3))

    # -- records of others -------------------------------------------------------------------------

    def _view(self, view: View) -> None:
        self._agreements.setdefault(view.round, ViewQuorum(view.round)).take(view)

    def _adopt(self, log: Log, agreement: ViewQuorum) -> None:
        """Adopt another peer's electorates and base if they give the table that counts; if need be
        without records that it does not have, such as those that came too late for most peers.
        """
        known = self.consensus
        mine = self._compute_table(known.ledger, self.base, known.electorates)
        if agreement.table in (None, mine.digest):
            self.table = mine
            return
        ways = itertools.product(self._histories(log), self._ledgers(log), self._bases(log))
        for history, ledger, base in ways:
            table = self._compute_table(ledger, base, history)
            if table.digest != agreement.table:
                continue
            known.electorates.update(history)
            self.base = base
            self.table = table
            if ledger is not known.ledger:
                known.keep(ledger)
            self._adopt_newest(log)
            return

    def _adopt_newest(self, log: Log) -> None:
        """Adopt the newest electorate that is not settled, if the own records give it too: after a
        restart the lottery needs it.
        """
        known = self.consensus
        round = self.round - SETTLED + 1
        settled = round + OPENS - SETTLED
        theirs = [other for other in log.electorates if other.round == round]
        if not theirs or round in known.electorates or settled < self.base.round:
            return
        then = compute_scores(
            known.ledger, known.electorates, self.rules, self.prices, settled, self.base
        )
        own = self._own_electorate(round, then)
        if own in theirs:
            known.electorates[round] = own

    def _own_electorate(self, round: int, table: Table) -> Electorate:
        known = self.consensus
        return electorate(
            self.run, round, known.ledger, known.electorates, self.rules, table, known.late
        )

    def _histories(self, log: Log) -> list[dict[int, Electorate]]:
        """Return the own electorates with those of ``log`` that were unknown, and with all of them
        in place of the own; of settled rounds alone, for the table checks no others.
        """
        own = self.consensus.electorates
        oldest = self._oldest() - BEHIND - 1
        theirs = {}
        for other in log.electorates:
            if oldest <= other.round <= self.round - SETTLED:
                theirs[other.round] = other
        if pairs_to_draw(theirs.values(), self.consensus.ledger) > MOST_PAIRS:
            return [own]
        histories = [theirs | own]
        if own | theirs != histories[0]:
            histories.append(own | theirs)
        return histories

    def _bases(self, log: Log) -> list[Table]:
        """Return the own base, and that of ``log`` if it may take its place."""
        is_like_own = log.base.round == self.base.round or not self.base.standings
        if log.base == self.base or not is_like_own or is_stale(log.base, self.round, self.rules):
            return [self.base]
        return [self.base, log.base]

    def _ledgers(self, log: Log) -> list[Ledger]:
        """Return the own ledger, and if it has any the same without settled records that the author
        of ``log`` does not have.
        """
        ledger = self.consensus.ledger
        settled = max(self.round - SETTLED, -1)
        theirs = {signed.record.id for signed in log.records}
        kept = []
        for record in ledger:
            if record.id in theirs or ledger.stamp(record) > settled:
                kept.append(record)
        if len(kept) == len(ledger):
            return [ledger]
        return [ledger, Ledger(kept)]
