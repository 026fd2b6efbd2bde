"""One peer's whole part in the vote: entering, claiming, planting, voting, scoring; no I/O and no clock of its own.

    participant.tick()            do what is due; may take as long as a check takes
    participant.take(signed)      take a record that came by gossip
    participant.slots()           claims to be made now; participant.claim(claim) publishes one
    participant.wanted            whose log to pull now; participant.learn(log) takes it in, participant.log(since) gives the own
    participant.table             everybody's scores; whoever is banned by it is left out

Rounds are Unix time over ``round_s``, so nobody leads and a wrong clock shows. `shoal.verification.consensus.sortition` and
`shoal.verification.consensus.quorum` give the timetable. Records of rounds against which nobody can appeal any more are forgotten;
their consequences live on in a base table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal.verification.consensus.cases import Times
from shoal.verification.consensus.electorate import electorate, root, void
from shoal.verification.consensus.ledger import Ledger
from shoal.verification.consensus.log import Log
from shoal.verification.consensus.planted_claims import BEHIND, Chain, must_plant
from shoal.verification.consensus.protocol import Consensus
from shoal.verification.consensus.quorum import ViewQuorum
from shoal.verification.consensus.records import Claim, Dispute, Entry, Opening, Sign, Signed, Verify, View, VoteRecord
from shoal.verification.consensus.reputation import ScoreRules, Table, compute_scores
from shoal.verification.consensus.rulings import Rules, anchored
from shoal.verification.consensus.sortition import OPENS, SETTLED, Electorate
from shoal.verification.consensus.types import Limits, Refused
from shoal.verification.consensus.voter import Check, Voter

SPARE = 4  # rounds that records are kept beyond the last in which something about them can change
PULLS = 3  # logs taken in for one round, at most


@dataclass(frozen=True)
class Slot:
    """Claim to be made; if ``planted``, the lottery demands that it is wrong."""

    round: int
    slot: int
    planted: bool


@dataclass(frozen=True)
class Wanted:
    """Request to pull the log of one of ``peers`` (best first) since round ``since``, soon: draws wait for it."""

    peers: tuple[str, ...]
    since: int


class Participant:
    """State machine of ``peer`` in ``run``. ``operator``: who runs it. ``publish`` spreads a record and never waits. ``clock``:
    Unix seconds; if it goes back the participant waits. ``salt``: 32 fresh secret bytes with each call.
    """

    def __init__(
        self, peer: str, run: str, *, operator: str, sign: Sign, verify: Verify, publish: Callable[[Signed], None], check: Check,
        clock: Callable[[], float], salt: Callable[[], bytes], rules: Rules, prices: ScoreRules, round_s: float,
        limits: Limits | None = None,
    ) -> None:  # fmt: skip
        self.peer, self.run, self.operator, self.round_s = peer, run, operator, round_s
        self.rules, self.prices, self.times = rules, prices, Times.of(round_s)
        self._read_clock, self._latest, self._salt = clock, clock(), salt
        self.round = int(self._latest // round_s)
        self.base = self.table = Table(-1, {}, {})
        self.consensus = Consensus(
            run, verify, self._now, rules=rules, times=self.times, limits=limits,
            banned=lambda peer: self.table.is_banned(peer, self.round),
        )  # fmt: skip
        self.consensus.views = self._view
        self.member = Voter(peer, self.consensus, publish, sign, check, salt)
        self._agreements: dict[int, ViewQuorum] = {}
        self._chains: list[Chain] = []
        self._planted: list[Claim] = []
        self._meant: list[Claim] = []  # those that were to be right
        self._pulled = 0
        self._started = False
        self.consensus.advance(self.round, self.round * round_s)
        # A peer that joins while views of the round are out has missed some: it states none until the next.
        self._stated = self.round if self._latest > self.round * round_s + self.times.skew_s else -1

    def tick(self, most: int = 1) -> int:
        """Do what is due; check at most ``most`` claims, which is what costs. Returns how many were checked."""
        now = self._now()
        if (round := int(now // self.round_s)) > self.round or not self._started:
            self._begin(round)
        begin, skew = self.round * self.round_s, self.times.skew_s
        if self._stated < self.round and now >= begin + skew:
            self._state()
        if now >= begin + 2 * skew:
            self._open(final=now >= begin + 3 * skew)
        return self.member.work(most)

    def take(self, signed: Signed, at: float | None = None) -> None:
        """Take a record that came ``at`` that Unix time, by default now; it matters if records wait for a check. Raises Refused."""
        self.consensus.take(signed, at)

    def slots(self) -> list[Slot]:
        """Return the claims to make in this round: none while banned, or until the own entry is old enough and draws are agreed."""
        before = self.consensus.electorates.get(self.round - BEHIND)
        entry = anchored(self.consensus.ledger, self.peer, self.round, self.rules)
        chain = next((chain for chain in self._chains if entry is not None and chain.anchor == entry.anchor), None)
        if before is None or not before.operators or chain is None or self.table.is_banned(self.peer, self.round):
            return []
        used = {claim.slot for claim in self.consensus.ledger.claims_of(self.peer, self.round)}
        link = chain.link(self.round)
        return [
            Slot(self.round, slot, must_plant(link, before.beacon, slot, self.rules.planted))
            for slot in range(self.rules.claims)
            if slot not in used
        ]

    def claim(self, claim: Claim) -> None:
        """Publish ``claim`` for one of `slots`. Raises Refused, for example if its round is over; then it is not sent."""
        if claim.peer != self.peer or claim.run != self.run:
            raise ValueError("a participant publishes its own claims only")
        planted = next((slot.planted for slot in self.slots() if (slot.round, slot.slot) == (claim.round, claim.slot)), None)
        if planted is None:
            raise Refused("A claim was not made: its round is over, or its slot is not free.", "late")
        self.member.publish(claim)
        (self._planted if planted else self._meant).append(claim)

    @property
    def wanted(self) -> Wanted | None:
        """Peers whose log to pull now; mostly None."""
        agreement = self._agreements.get(self.round - OPENS)
        views_in = self._now() >= self.round * self.round_s + 2 * self.times.skew_s
        if agreement is None or not views_in or self._stated < self.round or self._pulled >= PULLS:
            return None
        peers = agreement.sources()
        at = self._pulled % len(peers) if peers else 0
        return Wanted(peers[at:] + peers[:at], self._oldest()) if peers else None

    def learn(self, log: Log) -> int:
        """Take in another peer's log; return how many records were new. Its electorates and base count only if they match the
        views, or give the table that does; otherwise only the signed records are used.
        """
        self._pulled += 1
        agreement = self._agreements.get(self.round - OPENS)
        new = 0
        for signed in log.records:
            spare = self.rules.life + BEHIND if isinstance(signed.record, Entry) else 0
            if self._stamp(signed.record) >= self._oldest() - spare:
                new += self.consensus.learn(signed)
        if agreement is not None:
            for other in log.electorates:
                agreement.learned(other)
            self._adopt(log, agreement)
        return new

    def log(self, since: int) -> Log:
        """Return the log to hand out: base, electorates, and the records since round ``since``, newest first."""
        ledger = self.consensus.ledger
        stamped = [(ledger.stamp(record), record) for record in ledger]
        kept = [(stamp, record) for stamp, record in stamped if stamp is not None and (stamp >= since or isinstance(record, Entry))]
        kept.sort(key=lambda pair: (-pair[0], _ORDER.get(pair[1].KIND, len(_ORDER)), pair[1].id))
        known = dict(self.consensus.electorates)
        agreement = self._agreements.get(self.round - OPENS)
        if agreement is not None and agreement.proposed is not None:
            known.setdefault(agreement.round, agreement.electorate or agreement.proposed)
        electorates = tuple(known[round] for round in sorted(known))
        return Log(self.base, electorates, tuple(self.consensus.signed(record) for _, record in kept))

    # -- rounds ----------------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        self._latest = max(self._latest, self._read_clock())
        return self._latest

    def _oldest(self) -> int:
        """Return the oldest round whose claims are still needed."""
        return max(self.base.round + 1, self.round - self._keep())

    def _keep(self) -> int:
        return self.rules.appeal_rounds + SETTLED + SPARE

    def _begin(self, round: int) -> None:
        """Do what is due when ``round`` begins; rounds during which the process slept are left out."""
        if self._agreements.get(self.round - OPENS) is not None and self.round < round:
            self._open(final=True)
        self.round, self._pulled, self._started = round, 0, True
        self.consensus.advance(round, round * self.round_s)
        for old in [old for old in self._agreements if old < round - OPENS]:
            del self._agreements[old]
        self._enter()
        self._open_plants()
        self._dispute()

    def _enter(self) -> None:
        entries = self.consensus.ledger.entries_of(self.peer)
        fresh = any(self.round - entry.round < self.rules.life // 2 for entry in entries)
        if fresh or self.table.is_banned(self.peer, self.round):
            return
        chain = Chain(self._salt(), self.round, self.rules.life + BEHIND)
        if self._say(Entry(peer=self.peer, run=self.run, round=self.round, operator=self.operator, anchor=chain.anchor)):
            self._chains = [*self._chains[-self._keep() :], chain]

    def _open_plants(self) -> None:
        """Open planted claims, once all claims of their round are settled."""
        for claim in [claim for claim in self._planted if self.round - claim.round >= SETTLED - 1]:
            ruling = self.consensus.ruling(claim.id)
            if ruling is None or self.round - claim.round > self.rules.appeal_rounds:
                self._planted.remove(claim)
            elif ruling.outcome != "unverified":
                entry = anchored(self.consensus.ledger, self.peer, claim.round, self.rules)
                chain = next((chain for chain in self._chains if entry is not None and chain.anchor == entry.anchor), None)
                if chain is not None:
                    link = chain.link(claim.round)
                    attempt = len(ruling.trials) - 1 - (ruling.appeal is not None)
                    self._say(Opening(peer=self.peer, round=self.round, claim=claim.id, attempt=attempt, link=link))
                self._planted.remove(claim)

    def _dispute(self) -> None:
        """Ask for a second draw where claims that were meant to be right are rejected, as by colluders drawn together."""
        for claim in [claim for claim in self._meant if self.round - claim.round >= SETTLED - 1]:
            self._meant.remove(claim)
            ruling = self.consensus.ruling(claim.id)
            if ruling is not None and ruling.outcome == "invalid" and ruling.appeal is None:
                self._say(Dispute(peer=self.peer, round=self.round, claim=claim.id, attempt=len(ruling.trials) - 1))

    def _state(self) -> None:
        """Compute the scores, and publish this peer's view of the electorate that is due."""
        self._stated = self.round
        round, known = self.round - OPENS, self.consensus
        if round < 0:
            return
        self._forget()
        self.table = self._reckon(known.ledger, self.base, known.electorates)
        own = electorate(self.run, round, known.ledger, known.electorates, self.rules, self.table)
        view = View(peer=self.peer, run=self.run, round=round, root=root(own), table=self.table.digest)
        agreement = self._agreements.setdefault(round, ViewQuorum(round))
        recent = [at for at in range(round - self.rules.life, round) if at in known.electorates and known.electorates[at].operators]
        voters = set(known.electorates[recent[-1]].operators) & set(own.operators) if recent else None
        agreement.propose(view, own, voters or None)
        self._say(view)

    def _forget(self) -> None:
        known, before = self.consensus, self.round - self._keep()
        if before > 0 and self.base.round < before - 1:
            self.base = compute_scores(known.ledger, known.electorates, self.rules, self.prices, before - 1, self.base).base()
            known.forget(before)

    def _reckon(self, ledger: Ledger, base: Table, electorates: dict[int, Electorate]) -> Table:
        settled = max(self.round - SETTLED, base.round)
        return compute_scores(ledger, electorates, self.rules, self.prices, settled, base)

    def _open(self, final: bool) -> None:
        """Open the draws of the agreed electorate, also if it is learned late; nobody is drawn if there is no agreement."""
        round = self.round - OPENS
        agreement = self._agreements.get(round)
        if agreement is None or agreement.proposed is None or round in self.consensus.electorates:
            return
        found = agreement.electorate
        if found is None and final and agreement.root is None:
            found = void(self.run, round)
        if found is not None:
            self.consensus.open(found, (round + OPENS) * self.round_s + 3 * self.times.skew_s)

    # -- records of others -----------------------------------------------------------------------------------------------

    def _view(self, view: View) -> None:
        self._agreements.setdefault(view.round, ViewQuorum(view.round)).take(view)

    def _stamp(self, record: VoteRecord) -> int:
        """Return `Ledger.stamp`, or -1 for a record about an unknown claim."""
        stamp = self.consensus.ledger.stamp(record)
        return -1 if stamp is None else stamp

    def _adopt(self, log: Log, agreement: ViewQuorum) -> None:
        """Adopt another peer's electorates and base if they give the table that counts; if need be without records that it does
        not have, such as those that came too late for most peers.
        """
        known, settled = self.consensus, max(self.round - SETTLED, -1)
        mine = self._reckon(known.ledger, self.base, known.electorates)
        if agreement.table in (None, mine.digest):
            self.table = mine
            return
        before = self._oldest() - BEHIND - 1
        history = {other.round: other for other in log.electorates if before <= other.round < agreement.round}
        theirs = {signed.record.id for signed in log.records}
        late = {id(record) for record in known.ledger if record.id not in theirs and self._stamp(record) <= settled}
        without = Ledger(record for record in known.ledger if id(record) not in late)
        bases = [self.base]
        if log.base.round == self.base.round or not self.base.standings:
            bases.append(log.base)
        for ledger in (known.ledger, without):
            for base in bases:
                table = self._reckon(ledger, base, {**known.electorates, **history})
                if table.digest == agreement.table:
                    known.electorates.update(history)
                    self.base, self.table = base, table
                    if ledger is not known.ledger:
                        known.keep(ledger)
                    return

    def _say(self, record: VoteRecord) -> bool:
        """Publish, unless the own consensus refuses the record, which it counts."""
        try:
            self.member.publish(record)
        except Refused:
            return False
        return True


_ORDER = {kind: at for at, kind in enumerate(("entry", "claim", "dispute", "opening", "commitment", "reveal", "verdict"))}
