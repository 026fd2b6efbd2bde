"""Rulings on claims: a pure function of a set of signed records, with no clock, so that all peers
rule alike.

    ruling = rule(claim, ledger, electorates, Rules())
    ruling.outcome                                     # "valid", "invalid" or "unverified"

A claim is valid or invalid by strict majority of the votes that count, if they are a quorum; else
the next draw decides; after the last it is unverified. An appeal makes a larger draw, which is
final. Which votes count, and why: docs/internals.md, "Which votes count".
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from shoal.verification.consensus.ledger import Ledger
from shoal.verification.consensus.planting import BEHIND, belongs, must_plant
from shoal.verification.consensus.records import (
    Claim,
    Commitment,
    Dispute,
    Entry,
    Mark,
    Opening,
    Reveal,
    Verdict,
    Vote,
)
from shoal.verification.consensus.sortition import SETTLED, Electorate, draw_verifiers, is_audited

Outcome = Literal["valid", "invalid", "unverified"]
VOTES = get_args(Vote)
SPARE_ROUNDS = 4
"""Rounds that records are kept beyond the last in which something about them can change."""
Electorates = Mapping[int, Electorate]
PREFERRED: tuple[Mark, ...] = ("invalid", "valid", "withheld", "absent")
"""Order of preference, if signers of two verdicts give two marks a quorum."""


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
    """Claims that are verified in a round, of all authors who cannot be drawn themselves together:
    fresh keys cost nothing.
    """
    life: int = 8
    """Rounds that an entry holds; it is renewed every half of them."""
    proven: int = 2
    """Claims of a peer that were found valid before it can be drawn, once more peers than a draw
    needs have as many.
    """

    @property
    def kept_rounds(self) -> int:
        """Rounds whose records are kept."""
        return self.appeal_rounds + SETTLED + SPARE_ROUNDS


@dataclass(frozen=True)
class Trial:
    """One draw: its verifiers, the marks that count (None where no mark has a quorum), and who
    signed two different records.
    """

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
    """Draws whose marks count: up to the one that decided, then that of the appeal if there is one.
    """
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


def rule(
    claim: Claim,
    ledger: Ledger,
    electorates: Electorates,
    rules: Rules,
    ignored: Collection[str] = (),
) -> Ruling:
    """Rule on ``claim`` by the records in ``ledger``; ``ignored``: banned peers."""
    trials: list[Trial] = []
    for attempt, drawn in enumerate(first_draws(claim, electorates, rules)):
        trials.append(trial(ledger, claim.id, attempt, drawn, ignored))
        if trials[-1].decision is not None:
            break
    first = trials[-1].decision if trials else None
    if first is None:
        return Ruling(claim, "unverified", tuple(trials))
    appeals: list[Dispute | Opening] = []
    for appeal in ledger.appeals(claim.id):
        if appeal.peer not in ignored and appeal.attempt == len(trials) - 1:
            appeals.append(appeal)
    plants = _plants(appeals, claim, ledger, electorates, rules)
    for appeal in appeals:
        if isinstance(appeal, Opening) and (appeal not in plants or first == "invalid"):
            continue
        drawn = second_draw(appeal, claim, electorates, rules)
        final = trial(ledger, appeal.id, 0, drawn, ignored)
        if final.decision is not None:
            return Ruling(
                claim=claim,
                outcome=final.decision,
                trials=(*trials, final),
                appeal=appeal,
                opened=bool(plants),
                overturned=final.decision != first,
            )
    return Ruling(claim, first, tuple(trials), opened=bool(plants))


def _plants(
    appeals: Collection[Dispute | Opening],
    claim: Claim,
    ledger: Ledger,
    electorates: Electorates,
    rules: Rules,
) -> list[Opening]:
    """Return the openings that came in time, of a claim that its author had to plant."""
    plants: list[Opening] = []
    for appeal in appeals:
        in_time = 0 <= appeal.round - claim.round <= rules.appeal_rounds
        if not isinstance(appeal, Opening) or not in_time:
            continue
        if is_plant(appeal, claim, ledger, electorates, rules):
            plants.append(appeal)
    return plants


def trial(
    ledger: Ledger, case: bytes, attempt: int, drawn: tuple[str, ...], ignored: Collection[str] = ()
) -> Trial:
    """Return the marks of one draw that count.

    A later contradiction takes nothing back: what was signed first still counts.
    """
    stated: list[set[tuple[str, Mark]]] = [set() for _ in drawn]
    for peer in drawn:
        for verdict in ledger.ballots(Verdict, case, attempt, peer):
            if peer not in ignored and len(verdict.marks) == len(drawn):
                for statements, mark in zip(stated, verdict.marks, strict=True):
                    statements.add((peer, mark))
    marks: list[Mark | None] = []
    for peer, statements in zip(drawn, stated, strict=True):
        backed: list[str] = []
        if peer not in ignored:
            backed = [vote for vote in VOTES if is_backed(ledger, case, attempt, peer, vote)]
        marks.append(_mark_that_counts(statements, quorum(len(drawn)), backed))
    twice = [peer for peer in drawn if _signed_twice(ledger, case, attempt, peer)]
    return Trial(drawn, tuple(marks), frozenset(twice))


def _mark_that_counts(
    statements: Collection[tuple[str, Mark]], needed: int, backed: Collection[str]
) -> Mark | None:
    """Return the mark that ``needed`` verifiers state; a vote only if it is ``backed``."""
    count = Counter(mark for _, mark in statements)
    for mark in PREFERRED:
        if count[mark] >= needed and (mark not in VOTES or mark in backed):
            return mark
    return None


def _signed_twice(ledger: Ledger, case: bytes, attempt: int, peer: str) -> bool:
    kinds = (Commitment, Reveal, Verdict)
    return any(len(ledger.ballots(kind, case, attempt, peer)) > 1 for kind in kinds)


def decide(marks: Collection[Mark | None]) -> Vote | None:
    """Return the strict majority of the votes revealed, if they are a quorum of the verifiers."""
    count = Counter(mark for mark in marks if mark in VOTES)
    if count.total() < quorum(len(marks)) or count["valid"] == count["invalid"]:
        return None
    return "valid" if count["valid"] > count["invalid"] else "invalid"


def quorum(verifiers: int) -> int:
    return verifiers // 2 + 1


def is_backed(ledger: Ledger, case: bytes, attempt: int, peer: str, vote: str) -> bool:
    """Return whether ``peer`` signed that vote, and the commitment that it fits."""
    commitments = ledger.ballots(Commitment, case, attempt, peer)
    for reveal in ledger.ballots(Reveal, case, attempt, peer):
        if reveal.vote == vote and any(map(reveal.fits, commitments)):
            return True
    return False


def first_draws(
    claim: Claim, electorates: Electorates, rules: Rules
) -> tuple[tuple[str, ...], ...]:
    """Return the verifiers of each attempt; none if the electorate is unknown, the claim is not
    audited, or peers are too few.
    """
    electorate = electorates.get(claim.round)
    if electorate is None:
        return ()
    if electorate.claims is None:
        verified = is_audited(electorate.beacon, claim.id, rules.audit)
    else:
        verified = claim.id in electorate.claims
    if not verified:
        return ()
    return draw_verifiers(electorate, claim.id, rules.verifiers, {operator(electorate, claim.peer)})


def second_draw(
    appeal: Dispute | Opening, claim: Claim, electorates: Electorates, rules: Rules
) -> tuple[str, ...]:
    """Return the verifiers after ``appeal``: nobody of the author's, the appellant's, or an earlier
    verifier's operator. Empty if they are fewer than the first, or if the appellant is neither the
    author nor a voter: strangers cannot make others work.
    """
    electorate = electorates.get(appeal.round)
    first = first_draws(claim, electorates, rules)
    in_time = 0 <= appeal.round - claim.round <= rules.appeal_rounds
    if electorate is None or len(first) <= appeal.attempt or not in_time:
        return ()
    if appeal.peer != claim.peer and appeal.peer not in electorate.operators:
        return ()
    before = itertools.chain.from_iterable(first[: appeal.attempt + 1])
    barred = set()
    for peer in (claim.peer, appeal.peer, *before):
        barred.add(operator(electorate, peer))
        barred.add(operator(electorates[claim.round], peer))
    drawn = draw_verifiers(electorate, appeal.id, rules.appeal, barred)
    return drawn[0] if drawn and len(drawn[0]) >= len(first[0]) else ()


def operator(electorate: Electorate, peer: str) -> str:
    """Return who runs ``peer``; a peer outside the electorate stands for itself."""
    return electorate.operators.get(peer, peer)


def anchored(ledger: Ledger, peer: str, round: int, rules: Rules) -> Entry | None:
    """Return the entry whose chain decides what ``peer`` plants in ``round``: the newest of at
    least `BEHIND` rounds' age.
    """
    return ledger.entry(peer, round - BEHIND + 1, rules.life)


def is_single(claim: Claim, ledger: Ledger) -> bool:
    """Return whether the author of ``claim`` used its slot once."""
    slots = [other.slot for other in ledger.claims_of(claim.peer, claim.round)]
    return slots.count(claim.slot) == 1


def is_plant(
    opening: Opening, claim: Claim, ledger: Ledger, electorates: Electorates, rules: Rules
) -> bool:
    """Return whether the lottery told the author of ``claim`` to plant it: chain anchored before,
    and slot used once.
    """
    entry = anchored(ledger, claim.peer, claim.round, rules)
    before = electorates.get(claim.round - BEHIND)
    if opening.peer != claim.peer or entry is None or before is None:
        return False
    # Without an agreed electorate (`void`) its beacon could be known when the chain was made.
    if not before.operators:
        return False
    # An agreed electorate leaves out claims that share a slot.
    then = electorates.get(claim.round)
    if (then is None or then.claims is None) and not is_single(claim, ledger):
        return False
    drawn = must_plant(opening.link, before.beacon, claim.slot, rules.planted)
    return drawn and belongs(opening.link, entry.anchor, claim.round - entry.round)


def salts(
    round: int,
    ledger: Ledger,
    electorates: Electorates,
    rules: Rules,
    late: Collection[bytes] = (),
) -> list[bytes]:
    """Return the salts of the votes that count on claims of ``round``: they make the beacon of
    ``round + 1``. Left out is what could be chosen when the others' salts were known: votes in
    draws after the deciding one, and those of ``late`` commitments, by id.
    """
    found: list[bytes] = []
    for claim in ledger.claims():
        if claim.round != round:
            continue
        for attempt, drawn in enumerate(first_draws(claim, electorates, rules)):
            made = trial(ledger, claim.id, attempt, drawn)
            for peer, mark in zip(drawn, made.marks, strict=True):
                if mark not in VOTES:
                    continue
                commitments = ledger.ballots(Commitment, claim.id, attempt, peer)
                reveals = ledger.ballots(Reveal, claim.id, attempt, peer)
                # An author of two salts could choose between them.
                is_single = len(commitments) == len(reveals) == 1
                if is_single and commitments[0].id not in late:
                    found.append(reveals[0].salt)
            if made.decision is not None:
                break
    return sorted(found)
