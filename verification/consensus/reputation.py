"""Reputation of each peer: a table of scores that follows from the signed records alone.

Rounds are processed in order; the changes of a round are summed in integers, so neither the order of arrival nor the machine
matters. A score fades towards 0 and cannot be saved up beyond a ceiling that is less than one lie costs, so farming does not pay
for a defection. At the floor a peer is banned for some rounds, each time for longer, and comes back on probation.

Every loss is a mark or a decision that more than half of a draw's verifiers have signed, so nobody is banned by fewer.

Nobody is banned for votes that did not come, as those of an overloaded machine. They count as absence, beside the score: with three
a peer is absent and not drawn, until that has faded. Where nothing is decided they count for nobody, so an author who shows its
evidence to no verifier takes no seat from them.
"""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import comb

import msgpack

from shoal.verification.consensus.records import MAX_ROUND, Ledger
from shoal.verification.consensus.rulings import Electorates, Rules, Ruling, rule

# Odds of a vote: how often n drawn verifiers accept a wrong claim, or reject an honest one, in closed form.
#
# Model: a verifier that works misses a wrong claim with probability ``miss`` and rejects a good one with probability ``alarm``. A
# colluding one votes against the truth each time; a lazy one approves without looking. The claim is decided by the majority of n.


@dataclass(frozen=True)
class Odds:
    """Probabilities for one claim."""

    wrong_accepted: float
    honest_rejected: float


def drawn(n: int, share: float, population: int | None = None) -> list[float]:
    """Return P(c of n drawn peers belong to a group), c = 0..n: binomial, or hypergeometric if the ``population`` is finite.

    With a population the group has ``round(share * population)`` peers. Raises ValueError for an impossible draw.
    """
    if n < 1 or not 0 <= share <= 1:
        raise ValueError(f"a draw needs at least one verifier and a share from 0 to 1, got {n} and {share}")
    if population is None:
        return [comb(n, c) * share**c * (1 - share) ** (n - c) for c in range(n + 1)]
    if population < n:
        raise ValueError(f"{n} verifiers cannot be drawn from {population}: take a smaller n")
    group = round(share * population)
    return [comb(group, c) * comb(population - group, n - c) / comb(population, n) for c in range(n + 1)]


def _at_least(need: int, of: int, chance: float) -> float:
    """Return P(``need`` or more of ``of`` independent events happen)."""
    return sum(comb(of, k) * chance**k * (1 - chance) ** (of - k) for k in range(max(0, need), of + 1))


def vote(
    n: int, collude: float = 0.0, *, lazy: float = 0.0, miss: float = 0.01, alarm: float = 0.01, population: int | None = None
) -> Odds:
    """Return the odds of a claim before ``n`` (odd) drawn verifiers, of a population with these shares of colluding and lazy peers.

    >>> f"{vote(3, 0.1).wrong_accepted:.1%}"
    '3.3%'
    """
    if n % 2 == 0:
        raise ValueError(f"a vote needs an odd number of verifiers, got {n}")
    if not (lazy >= 0 and collude + lazy <= 1 and 0 <= miss <= 1 and 0 <= alarm <= 1):
        raise ValueError("shares and probabilities are from 0 to 1, and colluding and lazy peers together at most 1")
    need = n // 2 + 1
    accepted = sum(chance * _at_least(need - c, n - c, miss) for c, chance in enumerate(drawn(n, collude + lazy, population)))
    # A lazy verifier never rejects, so the colluders and those who work need the majority without it.
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
    """Return the share of claims to audit above which cheating does not pay: rate * P(detected) * penalty = gain; > 1: never.

    ``gain``, ``penalty``: per cheat, in the same unit.
    """
    if gain < 0 or penalty <= 0 or not 0 < detected <= 1:
        raise ValueError("gain must not be negative, penalty must be positive, and detected in (0, 1]")
    return gain / (penalty * detected)


ROW = 15  # numbers of a standing
ABSENT = 2000  # absence from which a peer is not drawn
MOST_ABSENCE = 2 * ABSENT  # absence of one that never votes: it is drawn again some twenty rounds after its last seat
MOST_SCORE = 2**15  # in a row, above and below 0: a score fades one part after the other
RETURN = 32  # each round absence loses this part of itself


@dataclass(frozen=True)
class ScoreRules:
    """Changes of a score by event, in thousandths of a point. Raises ValueError where cheating would pay."""

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
    """What a vote takes from absence. So a peer that misses less than a fifth of its votes stays."""
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

    def __post_init__(self) -> None:
        losses = (self.rejected, self.against, self.withheld, self.missed, self.lost)
        if max(losses) >= 0 or min(self.upheld, self.agreed, self.won) < 0:
            raise ValueError("losses must be negative, and gains must not")
        if not self.absent > self.present >= 0:
            raise ValueError("staying away must count for more than a vote takes back")
        if self.against < self.withheld:
            raise ValueError("hiding a vote must cost no less than a wrong one")
        if self.missed > self.against:
            raise ValueError("approving a planted claim must cost no less than another wrong vote")
        if not 0 <= self.ceiling < -self.rejected:
            raise ValueError("the ceiling must be below what a lie costs")
        if self.floor >= 0 or self.fade < 2 or not 1 <= self.ban <= self.longest:
            raise ValueError("the floor must be negative, fade at least 2, and 1 <= ban <= longest")


@dataclass
class Standing:
    """Record of one peer; scores in thousandths of a point, as of the table's round."""

    score: int = 0
    until: int | None = None
    """Last round of a ban, also of one that is over; None if it never was banned."""
    bans: int = 0
    absence: int = 0
    """From 0 to `MOST_ABSENCE`, in thousandths: more with each seat left empty, less with each vote and round."""
    claims: dict[str, int] = field(default_factory=lambda: {"valid": 0, "invalid": 0, "unverified": 0, "planted": 0})
    votes: dict[str, int] = field(default_factory=lambda: {"agreed": 0, "against": 0, "absent": 0, "withheld": 0, "missed": 0})
    appeals: dict[str, int] = field(default_factory=lambda: {"won": 0, "lost": 0})

    @property
    def row(self) -> tuple[int | None, ...]:
        """All fields as `ROW` numbers; counts end at `MAX_ROUND`."""
        counts = (min(count, MAX_ROUND) for group in (self.claims, self.votes, self.appeals) for count in group.values())
        return (self.score, self.until, self.bans, self.absence, *counts)

    @classmethod
    def of(cls, row: Sequence[int | None]) -> Standing:
        """Make a standing from its ``row``. ValueError unless it has `ROW` integers, all but the score >= 0 or None."""
        score, until, bans, absence, *counts = row
        numbers = (score, bans, absence, *counts, *([] if until is None else [until]))
        if len(row) != ROW or any(type(number) is not int or abs(number) > MAX_ROUND for number in numbers):
            raise ValueError("not a standing")
        most = abs(score or 0) > MOST_SCORE or (absence or 0) > MOST_ABSENCE
        if most or any(number < 0 for number in numbers[1:] if number is not None):
            raise ValueError("not a standing")
        standing = cls(int(score or 0), until, int(bans or 0), int(absence or 0))
        found = iter(int(count or 0) for count in counts)
        for group in (standing.claims, standing.votes, standing.appeals):
            group.update({name: next(found) for name in group})
        return standing


@dataclass(frozen=True)
class Table:
    """Standings at the end of ``round``, and the rulings they follow from, by claim id. Pairing and the choice of rollouts leave
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
        return standing.until if standing and standing.until is not None and standing.until > self.round else None

    def is_banned(self, peer: str, round: int | None = None) -> bool:
        """Return whether ``peer`` is banned in ``round``, by default the one after the table's."""
        until = self.banned_until(peer)
        return until is not None and (self.round + 1 if round is None else round) <= until

    def is_absent(self, peer: str) -> bool:
        """Return whether ``peer`` missed so many votes that it is not drawn."""
        return peer in self.standings and self.standings[peer].absence >= ABSENT

    def valid(self, peer: str) -> int:
        """Return how many claims of ``peer`` were found valid, which fresh keys have to show first."""
        return self.standings[peer].claims["valid"] if peer in self.standings else 0

    @functools.cached_property
    def digest(self) -> bytes:
        """SHA-256 of the encoding of round and standings, sorted by peer."""
        rows = [[peer, *standing.row] for peer, standing in sorted(self.standings.items())]
        return hashlib.sha256(b"shoal/verification/1/table\x00" + bytes(msgpack.packb([self.round, rows]))).digest()

    def base(self) -> Table:
        """Copy the standings without the rulings, to keep them when the records of their rounds are forgotten."""
        return Table(self.round, {peer: Standing.of(standing.row) for peer, standing in self.standings.items()}, {})


def compute_scores(
    ledger: Ledger, electorates: Electorates, rules: Rules, prices: ScoreRules, round: int, base: Table | None = None
) -> Table:
    """Compute the table at the end of ``round``; claims of later rounds do not count yet. With ``base``, the table of an earlier
    round, claims up to that round count through it, and their records are not needed any more.
    """
    standings: defaultdict[str, Standing] = defaultdict(Standing)
    standings.update(base.base().standings if base else {})
    rulings: dict[bytes, Ruling] = {}
    claims = [claim for claim in ledger.claims() if (base.round if base else -1) < claim.round <= round]
    last, at = (base.round if base else None), 0
    while at < len(claims):
        now = claims[at].round
        for standing in standings.values():
            _fade(standing, now - (last if last is not None else now), prices)
        banned = {peer for peer, standing in standings.items() if standing.until is not None and standing.until >= now}
        changes: defaultdict[str, int] = defaultdict(int)
        absences: defaultdict[str, int] = defaultdict(int)
        while at < len(claims) and claims[at].round == now:
            claim, at = claims[at], at + 1
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
        _fade(standing, round - (last if last is not None else round), prices)
    return Table(round, dict(sorted(standings.items())), rulings)


def _consequences(ruling: Ruling, standings: defaultdict[str, Standing], prices: ScoreRules) -> Iterator[tuple[str, int, int]]:
    """Count the events of ``ruling`` into ``standings`` and yield (peer, change of its score, change of its absence)."""
    if not ruling.trials:  # nobody was drawn: strangers' claims leave no trace
        return
    author = ruling.claim.peer
    standings[author].claims["planted" if ruling.planted else ruling.outcome] += 1
    if ruling.outcome == "valid":
        yield author, 0 if ruling.opened else prices.upheld, 0  # it was to be wrong: it earns nothing
    elif ruling.outcome == "invalid":
        yield author, prices.upheld if ruling.planted else prices.rejected, 0
    for trial in ruling.trials:
        for peer, mark in zip(trial.verifiers, trial.marks, strict=True):
            if mark is None or (mark != "withheld" and ruling.outcome == "unverified"):
                continue
            kind = _kind(mark, ruling)
            absence = prices.absent if mark == "absent" else 0 if mark == "withheld" else -prices.present
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
    """Fade score and absence by integer division towards 0, so that they end at 0 and every machine computes the same."""
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
