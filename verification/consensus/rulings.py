"""Rulings on claims: a pure function of a set of signed records, with no clock, so that all peers rule alike.

In each draw the verifiers state, when time is up, how they saw every verifier. A mark counts if more than half of all verifiers
state it, banned peers' statements apart; a vote counts only if the signed vote itself is there. So nobody can invent a vote of
another, and a quorum of clocks decides who was late. The claim is valid or invalid by strict majority of the votes that count,
if they are a quorum; else the next draw decides; after the last it is unverified, never valid.

A dispute, and an opening of a planted claim that was approved, makes a larger draw, which is final. The minority is judged against
the final outcome. Of several appeals against a claim the first by round and id that reached a decision counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from shoal.verification.consensus.records import (
    MAX_SEATS,
    Claim,
    Commitment,
    Dispute,
    Entry,
    Ledger,
    Mark,
    Opening,
    Reveal,
    Verdict,
    Vote,
)
from shoal.verification.consensus.sortition import (
    BEHIND,
    LEAST,
    SETTLED,
    Electorate,
    belongs,
    draw_verifiers,
    is_audited,
    must_plant,
)

Outcome = Literal["valid", "invalid", "unverified"]
Electorates = Mapping[int, Electorate]
PREFERRED: tuple[Mark, ...] = ("invalid", "valid", "withheld", "absent")  # if signers of two verdicts give two marks a quorum


@dataclass(frozen=True)
class Rules:
    """Parameters on which all peers of a run must agree."""

    verifiers: int = 3
    """Verifiers of a draw; odd."""
    appeal: int = 7
    """Verifiers of the draw after a dispute; odd."""
    audit: float = 1.0
    """Share of claims that verifiers are drawn for."""
    planted: float = 0.05
    """Share of claims that their authors must make wrong."""
    appeal_rounds: int = 16
    """Rounds after a claim's in which it can be disputed or opened."""
    claims: int = 1
    """Claims of a peer in a round; slots count from 0."""
    strangers: int = 8
    """Claims that are verified in a round, of all authors who cannot be drawn themselves together: fresh keys cost nothing."""
    life: int = 8
    """Rounds that an entry holds; it is renewed every half of them."""
    proven: int = 2
    """Claims of a peer that were found valid before it can be drawn, once more peers than a draw needs have as many."""

    def __post_init__(self) -> None:
        for name in ("verifiers", "appeal"):
            if getattr(self, name) % 2 == 0 or not LEAST <= getattr(self, name) <= MAX_SEATS:
                raise ValueError(f"{name} must be an odd number from {LEAST} to {MAX_SEATS}, not {getattr(self, name)}")
        if not 0 <= self.audit <= 1 or not 0 <= self.planted < 1:
            raise ValueError(f"audit must be from 0 to 1, and planted from 0 to below 1, not {self.audit} and {self.planted}")
        if not SETTLED <= self.appeal_rounds <= 4096 or not 4 <= self.life <= 4096 or not 1 <= self.claims <= 2**16:
            raise ValueError(f"appeal_rounds must be from {SETTLED} to 4096, life from 4 to 4096, and claims from 1 to {2**16}")
        if min(self.strangers, self.proven) < 0:
            raise ValueError(f"strangers and proven must not be negative, as {min(self.strangers, self.proven)} is")


@dataclass(frozen=True)
class Trial:
    """One draw: its verifiers, the marks that count (None where no mark has a quorum), and who signed two different records."""

    verifiers: tuple[str, ...]
    marks: tuple[Mark | None, ...]
    contradicted: frozenset[str] = frozenset()

    @property
    def decision(self) -> Vote | None:
        """The vote of the majority; None without a quorum or a majority."""
        return decide(self.marks)


@dataclass(frozen=True)
class Ruling:
    """Decision about a claim."""

    claim: Claim
    outcome: Outcome
    trials: tuple[Trial, ...]
    """Draws whose marks count: up to the one that decided, then that of the appeal if there is one."""
    appeal: Dispute | Opening | None = None
    """The appeal that made the final draw."""
    opened: bool = False
    """The author opened the claim in time, and had to plant it."""
    overturned: bool = False
    """The final draw decided against the first."""

    @property
    def planted(self) -> bool:
        """The claim was opened, and is indeed wrong."""
        return self.opened and self.outcome == "invalid"


def quorum(verifiers: int) -> int:
    """Return the least number that is more than half."""
    return verifiers // 2 + 1


def decide(marks: Collection[Mark | None]) -> Vote | None:
    """Return the strict majority of the votes revealed, if they are a quorum of the verifiers."""
    count = Counter(mark for mark in marks if mark in ("valid", "invalid"))
    if count.total() < quorum(len(marks)) or count["valid"] == count["invalid"]:
        return None
    return "valid" if count["valid"] > count["invalid"] else "invalid"


def is_backed(ledger: Ledger, case: bytes, attempt: int, peer: str, vote: str) -> bool:
    """Return whether ``peer`` committed to this vote and revealed it."""
    commitments = ledger.ballots(Commitment, case, attempt, peer)
    reveals = [reveal for reveal in ledger.ballots(Reveal, case, attempt, peer) if reveal.vote == vote]
    return any(reveal.fits(commitment) for reveal in reveals for commitment in commitments)


def contradicts(ledger: Ledger, case: bytes, attempt: int, peer: str) -> bool:
    """Return whether ``peer`` signed two commitments, reveals or verdicts in one draw: proof against itself."""
    return any(len(ledger.ballots(kind, case, attempt, peer)) > 1 for kind in (Commitment, Reveal, Verdict))


def trial(ledger: Ledger, case: bytes, attempt: int, drawn: tuple[str, ...], ignored: Collection[str] = ()) -> Trial:
    """Return the marks of one draw that count. A later contradiction takes nothing back: what was signed first still counts."""
    stated: list[set[tuple[str, Mark]]] = [set() for _ in drawn]
    for peer in drawn:
        for verdict in ledger.ballots(Verdict, case, attempt, peer):
            if peer not in ignored and len(verdict.marks) == len(drawn):
                for statements, mark in zip(stated, verdict.marks, strict=True):
                    statements.add((peer, mark))
    marks: list[Mark | None] = []
    for peer, statements in zip(drawn, stated, strict=True):
        count = Counter(mark for _, mark in statements)
        enough = [mark for mark in PREFERRED if count[mark] >= quorum(len(drawn))]
        votes = () if peer in ignored else ("valid", "invalid")
        marks.append(
            next(
                (
                    mark
                    for mark in enough
                    if mark in ("absent", "withheld") or (mark in votes and is_backed(ledger, case, attempt, peer, mark))
                ),
                None,
            )
        )
    return Trial(drawn, tuple(marks), frozenset(peer for peer in drawn if contradicts(ledger, case, attempt, peer)))


def first_draws(claim: Claim, electorates: Electorates, rules: Rules) -> tuple[tuple[str, ...], ...]:
    """Return the verifiers of each attempt; none if the electorate is unknown, the claim is not audited, or peers are too few."""
    electorate = electorates.get(claim.round)
    if electorate is None:
        return ()
    drawn_for = electorate.claims
    if claim.id not in drawn_for if drawn_for is not None else not is_audited(electorate.beacon, claim.id, rules.audit):
        return ()
    return draw_verifiers(electorate, claim.id, rules.verifiers, {operator(electorate, claim.peer)})


def second_draw(appeal: Dispute | Opening, claim: Claim, electorates: Electorates, rules: Rules) -> tuple[str, ...]:
    """Return the verifiers after ``appeal``: nobody of the author's, the appellant's, or an earlier verifier's operator. Empty if
    they are fewer than the first, or if the appellant is neither the author nor a voter: strangers cannot make others work.
    """
    electorate, first = electorates.get(appeal.round), first_draws(claim, electorates, rules)
    if electorate is None or len(first) <= appeal.attempt or not 0 <= appeal.round - claim.round <= rules.appeal_rounds:
        return ()
    if appeal.peer != claim.peer and appeal.peer not in electorate.operators:
        return ()
    before = [peer for drawn in first[: appeal.attempt + 1] for peer in drawn]
    involved, then = (claim.peer, appeal.peer, *before), electorates[claim.round]
    barred = {operator(known, peer) for peer in involved for known in (electorate, then)}
    drawn = draw_verifiers(electorate, appeal.id, rules.appeal, barred)
    return drawn[0] if drawn and len(drawn[0]) >= len(first[0]) else ()


def operator(electorate: Electorate, peer: str) -> str:
    """Return who runs ``peer``; a peer outside the electorate stands for itself."""
    return electorate.operators.get(peer, peer)


def anchored(ledger: Ledger, peer: str, round: int, rules: Rules) -> Entry | None:
    """Return the entry whose chain decides what ``peer`` plants in ``round``: the newest of at least `BEHIND` rounds' age."""
    return ledger.entry(peer, round - BEHIND + 1, rules.life)


def is_single(claim: Claim, ledger: Ledger) -> bool:
    """Return whether the author of ``claim`` used its slot once."""
    return sum(other.slot == claim.slot for other in ledger.claims_of(claim.peer, claim.round)) == 1


def is_plant(opening: Opening, claim: Claim, ledger: Ledger, electorates: Electorates, rules: Rules) -> bool:
    """Return whether the lottery told the author of ``claim`` to plant it: chain anchored before, and slot used once."""
    entry, before = anchored(ledger, claim.peer, claim.round, rules), electorates.get(claim.round - BEHIND)
    if opening.peer != claim.peer or entry is None or before is None or not before.operators:
        return False  # also without an agreed electorate (`electorate.void`): its beacon could be known when the chain was made
    # An agreed electorate leaves out claims that share a slot.
    then = electorates.get(claim.round)
    if (then is None or then.claims is None) and not is_single(claim, ledger):
        return False
    drawn = must_plant(opening.link, before.beacon, claim.slot, rules.planted)
    return drawn and belongs(opening.link, entry.anchor, claim.round - entry.round)


def rule(claim: Claim, ledger: Ledger, electorates: Electorates, rules: Rules, ignored: Collection[str] = ()) -> Ruling:
    """Rule on ``claim`` by the records in ``ledger``; ``ignored``: banned peers."""
    trials: list[Trial] = []
    for attempt, drawn in enumerate(first_draws(claim, electorates, rules)):
        trials.append(trial(ledger, claim.id, attempt, drawn, ignored))
        if trials[-1].decision is not None:
            break
    first = trials[-1].decision if trials else None
    if first is None:
        return Ruling(claim, "unverified", tuple(trials))
    appeals = [appeal for appeal in ledger.appeals(claim.id) if appeal.peer not in ignored and appeal.attempt == len(trials) - 1]
    plants = [
        appeal
        for appeal in appeals
        if isinstance(appeal, Opening)
        and 0 <= appeal.round - claim.round <= rules.appeal_rounds
        and is_plant(appeal, claim, ledger, electorates, rules)
    ]
    for appeal in appeals:
        if isinstance(appeal, Opening) and (appeal not in plants or first == "invalid"):
            continue
        final = trial(ledger, appeal.id, 0, second_draw(appeal, claim, electorates, rules), ignored)
        if final.decision is not None:
            return Ruling(claim, final.decision, (*trials, final), appeal, bool(plants), final.decision != first)
    return Ruling(claim, first, tuple(trials), None, bool(plants))


def salts(round: int, ledger: Ledger, electorates: Electorates, rules: Rules) -> list[bytes]:
    """Return the salts of the votes that count on claims of ``round``: they make the beacon of ``round + 1`` (`sortition`)."""
    found: list[bytes] = []
    for claim in ledger.claims():
        if claim.round == round:
            for attempt, drawn in enumerate(first_draws(claim, electorates, rules)):
                for peer, mark in zip(drawn, trial(ledger, claim.id, attempt, drawn).marks, strict=True):
                    reveals = ledger.ballots(Reveal, claim.id, attempt, peer) if mark in ("valid", "invalid") else []
                    # An author who revealed two salts could choose between them.
                    found += [reveals[0].salt] if len(reveals) == 1 else []
    return sorted(found)
