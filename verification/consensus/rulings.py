"""Rulings on claims: a pure function of a set of signed records, with no clock, so that all peers
rule alike.

In each draw the verifiers state, when time is up, how they saw every verifier. A mark counts if
more than half of all verifiers state it, banned peers' statements apart; a vote counts only if the
signed vote itself is there. So nobody can invent a vote of another, and a quorum of clocks decides
who was late. The claim is valid or invalid by strict majority of the votes that count, if they are
a quorum; else the next draw decides; after the last it is unverified, never valid.

A dispute, and an opening of a planted claim that was approved, makes a larger draw, which is final.
The minority is judged against the final outcome. Of several appeals against a claim the first by
round and id that reached a decision counts.

Reputation of each peer: a table of scores that follows from the signed records alone.

Rounds are processed in order; the changes of a round are summed in integers, so neither the order
of arrival nor the machine matters. A score fades towards 0 and cannot be saved up beyond a ceiling
that is less than one lie costs, so farming does not pay for a defection. At the floor a peer is
banned for some rounds, each time for longer, and comes back on probation.

Every loss is a mark or a decision that more than half of a draw's verifiers have signed, so nobody
is banned by fewer.

Nobody is banned for votes that did not come, as those of an overloaded machine. They count as
absence, beside the score: with three a peer is absent and not drawn, until that has faded. Where
nothing is decided they count for nobody, so an author who shows its evidence to no verifier takes
no seat from them.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import comb
from typing import Literal, get_args

import msgpack

from shoal.verification.consensus.records import (
    BEHIND,
    MAX_ROUND,
    Claim,
    Commitment,
    Dispute,
    Electorate,
    Entry,
    Ledger,
    Mark,
    Opening,
    Reveal,
    Verdict,
    Vote,
    belongs,
    draw_verifiers,
    is_audited,
    must_plant,
)

Outcome = Literal["valid", "invalid", "unverified"]
VOTES = get_args(Vote)
Electorates = Mapping[int, Electorate]
PREFERRED: tuple[Mark, ...] = (
    "invalid",
    "valid",
    "withheld",
    "absent",
)  # if signers of two verdicts give two marks a quorum


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


def quorum(verifiers: int) -> int:
    return verifiers // 2 + 1


def decide(marks: Collection[Mark | None]) -> Vote | None:
    """Return the strict majority of the votes revealed, if they are a quorum of the verifiers."""
    count = Counter(mark for mark in marks if mark in VOTES)
    if count.total() < quorum(len(marks)) or count["valid"] == count["invalid"]:
        return None
    return "valid" if count["valid"] > count["invalid"] else "invalid"


def is_backed(ledger: Ledger, case: bytes, attempt: int, peer: str, vote: str) -> bool:
    commitments = ledger.ballots(Commitment, case, attempt, peer)
    reveals = [
        reveal for reveal in ledger.ballots(Reveal, case, attempt, peer) if reveal.vote == vote
    ]
    return any(reveal.fits(commitment) for reveal in reveals for commitment in commitments)


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
        count = Counter(mark for _, mark in statements)
        enough = [mark for mark in PREFERRED if count[mark] >= quorum(len(drawn))]
        backed = (
            []
            if peer in ignored
            else [vote for vote in VOTES if is_backed(ledger, case, attempt, peer, vote)]
        )
        marks.append(next((mark for mark in enough if mark not in VOTES or mark in backed), None))
    twice = (
        p
        for p in drawn
        for kind in (Commitment, Reveal, Verdict)
        if len(ledger.ballots(kind, case, attempt, p)) > 1
    )
    return Trial(drawn, tuple(marks), frozenset(twice))


def first_draws(
    claim: Claim, electorates: Electorates, rules: Rules
) -> tuple[tuple[str, ...], ...]:
    """Return the verifiers of each attempt; none if the electorate is unknown, the claim is not
    audited, or peers are too few.
    """
    electorate = electorates.get(claim.round)
    if electorate is None:
        return ()
    drawn_for = electorate.claims
    if (
        claim.id not in drawn_for
        if drawn_for is not None
        else not is_audited(electorate.beacon, claim.id, rules.audit)
    ):
        return ()
    return draw_verifiers(electorate, claim.id, rules.verifiers, {operator(electorate, claim.peer)})


def second_draw(
    appeal: Dispute | Opening, claim: Claim, electorates: Electorates, rules: Rules
) -> tuple[str, ...]:
    """Return the verifiers after ``appeal``: nobody of the author's, the appellant's, or an earlier
    verifier's operator. Empty if they are fewer than the first, or if the appellant is neither the
    author nor a voter: strangers cannot make others work.
    """
    electorate, first = electorates.get(appeal.round), first_draws(claim, electorates, rules)
    if (
        electorate is None
        or len(first) <= appeal.attempt
        or not 0 <= appeal.round - claim.round <= rules.appeal_rounds
    ):
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
    """Return the entry whose chain decides what ``peer`` plants in ``round``: the newest of at
    least `BEHIND` rounds' age.
    """
    return ledger.entry(peer, round - BEHIND + 1, rules.life)


def is_single(claim: Claim, ledger: Ledger) -> bool:
    """Return whether the author of ``claim`` used its slot once."""
    return sum(other.slot == claim.slot for other in ledger.claims_of(claim.peer, claim.round)) == 1


def is_plant(
    opening: Opening, claim: Claim, ledger: Ledger, electorates: Electorates, rules: Rules
) -> bool:
    """Return whether the lottery told the author of ``claim`` to plant it: chain anchored before,
    and slot used once.
    """
    entry, before = (
        anchored(ledger, claim.peer, claim.round, rules),
        electorates.get(claim.round - BEHIND),
    )
    if opening.peer != claim.peer or entry is None or before is None or not before.operators:
        # also without an agreed electorate (`electorate.void`): its beacon could be known when the
        # chain was made
        return False
    # An agreed electorate leaves out claims that share a slot.
    then = electorates.get(claim.round)
    if (then is None or then.claims is None) and not is_single(claim, ledger):
        return False
    drawn = must_plant(opening.link, before.beacon, claim.slot, rules.planted)
    return drawn and belongs(opening.link, entry.anchor, claim.round - entry.round)


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
    appeals = [
        appeal
        for appeal in ledger.appeals(claim.id)
        if appeal.peer not in ignored and appeal.attempt == len(trials) - 1
    ]
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
            return Ruling(
                claim,
                final.decision,
                (*trials, final),
                appeal,
                bool(plants),
                final.decision != first,
            )
    return Ruling(claim, first, tuple(trials), None, bool(plants))


def salts(round: int, ledger: Ledger, electorates: Electorates, rules: Rules) -> list[bytes]:
    """Return the salts of the votes that count on claims of ``round``: they make the beacon of
    ``round + 1`` (`sortition`).
    """
    found: list[bytes] = []
    for claim in ledger.claims():
        if claim.round == round:
            for attempt, drawn in enumerate(first_draws(claim, electorates, rules)):
                for peer, mark in zip(
                    drawn, trial(ledger, claim.id, attempt, drawn).marks, strict=True
                ):
                    reveals = (
                        ledger.ballots(Reveal, claim.id, attempt, peer) if mark in VOTES else []
                    )
                    # An author who revealed two salts could choose between them.
                    found += [reveals[0].salt] if len(reveals) == 1 else []
    return sorted(found)


# Odds of a vote: how often n drawn verifiers accept a wrong claim, or reject an honest one, in
# closed form.
#
# Model: a verifier that works misses a wrong claim with probability ``miss`` and rejects a good one
# with probability ``alarm``. A colluding one votes against the truth each time; a lazy one approves
# without looking. The claim is decided by the majority of n.


@dataclass(frozen=True)
class Odds:
    """Probabilities for one claim."""

    wrong_accepted: float
    honest_rejected: float


def drawn(n: int, share: float, population: int | None = None) -> list[float]:
    """Return P(c of n drawn peers belong to a group), c = 0..n: binomial, or hypergeometric if the
    ``population`` is finite.

    With a population the group has ``round(share * population)`` peers. Raises ValueError for an
    impossible draw.
    """
    if n < 1 or not 0 <= share <= 1:
        raise ValueError(
            f"a draw needs at least one verifier and a share from 0 to 1, got {n} and {share}"
        )
    if population is None:
        return [comb(n, c) * share**c * (1 - share) ** (n - c) for c in range(n + 1)]
    if population < n:
        raise ValueError(f"{n} verifiers cannot be drawn from {population}: take a smaller n")
    group = round(share * population)
    return [
        comb(group, c) * comb(population - group, n - c) / comb(population, n) for c in range(n + 1)
    ]


def _at_least(need: int, of: int, chance: float) -> float:
    """Return P(``need`` or more of ``of`` independent events happen)."""
    return sum(
        comb(of, k) * chance**k * (1 - chance) ** (of - k) for k in range(max(0, need), of + 1)
    )


def vote(
    n: int,
    collude: float = 0.0,
    *,
    lazy: float = 0.0,
    miss: float = 0.01,
    alarm: float = 0.01,
    population: int | None = None,
) -> Odds:
    """Return the odds of a claim before ``n`` (odd) drawn verifiers, of a population with these
    shares of colluding and lazy peers.

    >>> f"{vote(3, 0.1).wrong_accepted:.1%}"
    '3.3%'
    """
    if n % 2 == 0:
        raise ValueError(f"a vote needs an odd number of verifiers, got {n}")
    if not (lazy >= 0 and collude + lazy <= 1 and 0 <= miss <= 1 and 0 <= alarm <= 1):
        raise ValueError(
            "shares and probabilities are from 0 to 1, and colluding and lazy peers together at "
            "most 1"
        )
    need = n // 2 + 1
    accepted = sum(
        chance * _at_least(need - c, n - c, miss)
        for c, chance in enumerate(drawn(n, collude + lazy, population))
    )
    # A lazy verifier never rejects, so the colluders and those who work need the majority without
    # it.
    among = min(1.0, lazy / (1 - collude)) if collude < 1 else 0.0
    others = None if population is None else population - round(collude * population)
    rejected = 0.0
    for c, chance in enumerate(drawn(n, collude, population)):
        if n > c and chance > 0:
            for idle, share in enumerate(drawn(n - c, among, others)):
                rejected += chance * share * _at_least(need - c, n - c - idle, alarm)
        elif chance > 0:
            rejected += chance
    return Odds(wrong_accepted=accepted, honest_rejected=rejected)


def least_audit(gain: float, penalty: float, detected: float) -> float:
    """Return the share of claims to audit above which cheating does not pay: rate * P(detected) *
    penalty = gain; > 1: never.

    ``gain``, ``penalty``: per cheat, in the same unit.
    """
    if gain < 0 or penalty <= 0 or not 0 < detected <= 1:
        raise ValueError(
            "gain must not be negative, penalty must be positive, and detected in (0, 1]"
        )
    return gain / (penalty * detected)


ROW = 15  # numbers of a standing
ABSENT = 2000  # absence from which a peer is not drawn
MOST_ABSENCE = (
    2 * ABSENT
)  # absence of one that never votes: it is drawn again some twenty rounds after its last seat
MOST_UNTIL = 2**37  # rounds of a day up to it have dates
MOST_SCORE = 2**15  # in a row, above and below 0: a score fades one part after the other
RETURN = 32  # each round absence loses this part of itself


@dataclass(frozen=True)
class ScoreRules:
    """Changes of a score by event, in thousandths of a point."""

    upheld: int = 100
    """Change for the author of a claim found valid."""
    rejected: int = -6000
    """Change for the author of a claim found invalid."""
    agreed: int = 50
    """Change for a verifier that voted as was decided in the end."""
    against: int = -2000
    """Change for a verifier that voted otherwise."""
    absent: int = 800
    """Absence of a verifier that sent no commitment in time; its score stays as it is."""
    present: int = 200
    """What a vote takes from absence. So a peer that misses less than a fifth of its votes stays.
    """
    withheld: int = -2000
    """Change for a verifier whose vote did not come, or was not the one it committed to."""
    missed: int = -8000
    """Change for a verifier that approved a planted claim."""
    won: int = 500
    """Change for a peer whose dispute, or opening, overturned a decision."""
    lost: int = -2000
    """Change for a peer whose dispute did not."""
    ceiling: int = 5000
    floor: int = -10_000
    fade: int = 256
    """Each round a score loses this part of itself."""
    ban: int = 64
    """Rounds of the first ban; each further one is twice as long."""
    longest: int = 4096
    """Rounds of the longest ban."""


@dataclass
class Standing:
    """Record of one peer; scores in thousandths of a point, as of the table's round."""

    score: int = 0
    until: int | None = None
    """Last round of a ban, also of one that is over; None if it never was banned."""
    bans: int = 0
    absence: int = 0
    """From 0 to `MOST_ABSENCE`, in thousandths: more with each seat left empty, less with each vote
    and round.
    """
    claims: dict[str, int] = field(
        default_factory=lambda: {"valid": 0, "invalid": 0, "unverified": 0, "planted": 0}
    )
    votes: dict[str, int] = field(
        default_factory=lambda: {"agreed": 0, "against": 0, "absent": 0, "withheld": 0, "missed": 0}
    )
    appeals: dict[str, int] = field(default_factory=lambda: {"won": 0, "lost": 0})

    @property
    def row(self) -> tuple[int | None, ...]:
        """All fields as `ROW` numbers; counts end at `MAX_ROUND`."""
        counts = (
            min(count, MAX_ROUND)
            for group in (self.claims, self.votes, self.appeals)
            for count in group.values()
        )
        return (self.score, self.until, self.bans, self.absence, *counts)

    @classmethod
    def of(cls, row: Sequence[int | None]) -> Standing:
        """Make a standing from its ``row``.

        ValueError unless it has `ROW` integers, all but the score >= 0 or None.
        """
        score, until, bans, absence, *counts = row
        numbers = (score, bans, absence, *counts, *([] if until is None else [until]))
        if len(row) != ROW or any(
            type(number) is not int or abs(number) > MAX_ROUND for number in numbers
        ):
            raise ValueError("not a standing")
        most = (
            abs(score or 0) > MOST_SCORE
            or (absence or 0) > MOST_ABSENCE
            or (until or 0) > MOST_UNTIL
        )
        if most or any(number < 0 for number in numbers[1:] if number is not None):
            raise ValueError("not a standing")
        standing = cls(int(score or 0), until, int(bans or 0), int(absence or 0))
        found = iter(int(count or 0) for count in counts)
        for group in (standing.claims, standing.votes, standing.appeals):
            group.update({name: next(found) for name in group})
        return standing


@dataclass(frozen=True)
class Table:
    """Standings at the end of ``round``, and the rulings they follow from, by claim id.

    Pairing and the choice of rollouts leave
    out whoever `is_banned`.
    """

    round: int
    standings: dict[str, Standing]
    rulings: dict[bytes, Ruling]

    def score(self, peer: str) -> int:
        """Return a score in thousandths of a point; 0 for a stranger."""
        return self.standings[peer].score if peer in self.standings else 0

    def banned_until(self, peer: str) -> int | None:
        """Return the last round of a ban that lasts beyond the table's round, or None."""
        standing = self.standings.get(peer)
        return (
            standing.until
            if standing and standing.until is not None and standing.until > self.round
            else None
        )

    def is_banned(self, peer: str, round: int | None = None) -> bool:
        """Return whether ``peer`` is banned in ``round``, by default the one after the table's."""
        until = self.banned_until(peer)
        return until is not None and (self.round + 1 if round is None else round) <= until

    def is_absent(self, peer: str) -> bool:
        """Return whether ``peer`` missed so many votes that it is not drawn."""
        return peer in self.standings and self.standings[peer].absence >= ABSENT

    def valid(self, peer: str) -> int:
        """Return how many claims of ``peer`` were found valid, which fresh keys have to show
        first.
        """
        return self.standings[peer].claims["valid"] if peer in self.standings else 0

    @functools.cached_property
    def digest(self) -> bytes:
        """SHA-256 of the encoding of round and standings, sorted by peer."""
        rows = [[peer, *standing.row] for peer, standing in sorted(self.standings.items())]
        return hashlib.sha256(
            b"shoal/verification/1/table\x00" + bytes(msgpack.packb([self.round, rows]))
        ).digest()

    def base(self) -> Table:
        """Copy the standings without the rulings, to keep them when the records of their rounds are
        forgotten.
        """
        return Table(
            self.round,
            {peer: Standing.of(standing.row) for peer, standing in self.standings.items()},
            {},
        )


def compute_scores(
    ledger: Ledger,
    electorates: Electorates,
    rules: Rules,
    prices: ScoreRules,
    round: int,
    base: Table | None = None,
) -> Table:
    """Compute the table at the end of ``round``; claims of later rounds do not count yet.

    With ``base``, the table of an earlier
    round, claims up to that round count through it, and their records are not needed any more.
    """
    standings: defaultdict[str, Standing] = defaultdict(Standing)
    standings.update(base.base().standings if base else {})
    rulings: dict[bytes, Ruling] = {}
    last = base.round if base else -1
    claims = [claim for claim in ledger.claims() if last < claim.round <= round]
    for now, published in itertools.groupby(claims, key=lambda claim: claim.round):
        for standing in standings.values():
            _fade(standing, now - last, prices)
        banned = {
            peer
            for peer, standing in standings.items()
            if standing.until is not None and standing.until >= now
        }
        changes: defaultdict[str, int] = defaultdict(int)
        absences: defaultdict[str, int] = defaultdict(int)
        for claim in published:
            if claim.peer in banned:
                continue
            ruling = rulings[claim.id] = rule(claim, ledger, electorates, rules, banned)
            for peer, change, absence in _consequences(ruling, standings, prices):
                changes[peer] += change
                absences[peer] += absence
        for peer, change in changes.items():
            if peer not in banned:
                _apply(standings[peer], change, now, prices)
        for peer, absence in absences.items():
            standings[peer].absence = min(max(standings[peer].absence + absence, 0), MOST_ABSENCE)
        last = now
    for standing in standings.values():
        _fade(standing, round - last, prices)
    return Table(round, dict(sorted(standings.items())), rulings)


def _consequences(
    ruling: Ruling, standings: defaultdict[str, Standing], prices: ScoreRules
) -> Iterator[tuple[str, int, int]]:
    """Count the events of ``ruling`` into ``standings`` and yield (peer, change of its score,
    change of its absence).
    """
    if not ruling.trials:  # nobody was drawn: strangers' claims leave no trace
        return
    author = ruling.claim.peer
    standings[author].claims["planted" if ruling.planted else ruling.outcome] += 1
    if ruling.outcome == "valid":
        yield (
            author,
            0 if ruling.opened else prices.upheld,
            0,
        )  # it was to be wrong: it earns nothing
    elif ruling.outcome == "invalid":
        yield author, prices.upheld if ruling.planted else prices.rejected, 0
    for trial in ruling.trials:
        for peer, mark in zip(trial.verifiers, trial.marks, strict=True):
            if mark is None or (mark != "withheld" and ruling.outcome == "unverified"):
                continue
            kind = _kind(mark, ruling)
            absence = (
                prices.absent if mark == "absent" else 0 if mark == "withheld" else -prices.present
            )
            change = 0 if kind == "absent" else int(getattr(prices, kind))
            if peer in trial.contradicted and change > prices.withheld:
                kind, change = "withheld", prices.withheld
            standings[peer].votes[kind] += 1
            yield peer, change, absence
    if ruling.appeal is not None:
        kind = "won" if ruling.overturned else "lost"
        standings[ruling.appeal.peer].appeals[kind] += 1
        yield ruling.appeal.peer, int(getattr(prices, kind)), 0


def _kind(mark: str, ruling: Ruling) -> str:
    if mark in ("absent", "withheld"):
        return mark
    if mark == ruling.outcome:
        return "agreed"
    return "missed" if ruling.planted else "against"


def _fade(standing: Standing, rounds: int, prices: ScoreRules) -> None:
    """Fade score and absence by integer division towards 0, so that they end at 0 and every machine
    computes the same.
    """
    for _ in range(rounds):
        if standing.score == 0 and standing.absence == 0:
            return
        standing.absence = standing.absence * (RETURN - 1) // RETURN
        sign = 1 if standing.score > 0 else -1
        standing.score = sign * (abs(standing.score) * (prices.fade - 1) // prices.fade)


def _apply(standing: Standing, change: int, now: int, prices: ScoreRules) -> None:
    standing.score = min(standing.score + change, prices.ceiling)
    if standing.score <= prices.floor:
        standing.until = now + min(prices.ban * 2 ** min(standing.bans, 32), prices.longest)
        standing.bans += 1
        standing.score = prices.floor // 2  # probation
