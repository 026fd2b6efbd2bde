"""Reputation of each peer: a table of scores that follows from the signed records alone.

    table = compute_scores(ledger, electorates, Rules(), ScoreRules(), round)
    table.score("peer"), table.is_banned("peer"), table.is_absent("peer")

Rounds are processed in order; the changes of a round are summed in integers, so neither the order
of arrival nor the machine matters. Why a defection does not pay, and why nobody is banned for votes
that did not come: docs/internals.md, "Reputation".
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgpack

from shoal.verification.consensus.ledger import Ledger
from shoal.verification.consensus.records import MAX_ROUND, Mark
from shoal.verification.consensus.rulings import Electorates, Rules, Ruling, rule

ROW = 15
"""Numbers of a standing, as it is sent."""
ABSENT = 2000
"""Absence from which a peer is not drawn, in thousandths: three missed votes."""
MOST_ABSENCE = 2 * ABSENT
"""Absence of one that never votes: it is drawn again some twenty rounds after its last seat."""
MOST_UNTIL = 2**37
"""Last round of a ban, at most: rounds of a day up to it have dates."""
MOST_STANDINGS = 2**14
"""Standings in a base: fresh keys whose claims were checked must not fill every peer's memory."""
MOST_SCORE = 2**15
"""Score, at most, above and below 0."""
ABSENCE_FADE = 32
"""Each round absence loses this part of itself."""


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
        counts = [*self.claims.values(), *self.votes.values(), *self.appeals.values()]
        bounded = [min(count, MAX_ROUND) for count in counts]
        return (self.score, self.until, self.bans, self.absence, *bounded)

    @classmethod
    def of(cls, row: Sequence[int | None]) -> Standing:
        """Make a standing from its ``row``.

        ValueError unless it has `ROW` integers, all but the score >= 0 or None.
        """
        if len(row) != ROW:
            raise ValueError("not a standing")
        score, until, bans, absence, *counts = row
        standing = cls(
            score=_whole(score, -MOST_SCORE, MOST_SCORE),
            until=None if until is None else _whole(until, 0, MOST_UNTIL),
            bans=_whole(bans, 0, MAX_ROUND),
            absence=_whole(absence, 0, MOST_ABSENCE),
        )
        left = iter(counts)
        for group in (standing.claims, standing.votes, standing.appeals):
            for name in group:
                group[name] = _whole(next(left), 0, MAX_ROUND)
        return standing


def _whole(number: object, least: int, most: int) -> int:
    if type(number) is not int or not least <= number <= most:
        raise ValueError("not a standing")
    return number


@dataclass(frozen=True)
class Table:
    """Standings at the end of ``round``, and the rulings they follow from, by claim id.

    Pairing and the choice of rollouts leave out whoever `is_banned`.
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
        if standing is None or standing.until is None or standing.until <= self.round:
            return None
        return standing.until

    def is_banned(self, peer: str, round: int | None = None) -> bool:
        """Return whether ``peer`` is banned in ``round``, by default the one after the table's."""
        until = self.banned_until(peer)
        if until is None:
            return False
        if round is None:
            round = self.round + 1
        return round <= until

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
        packed = bytes(msgpack.packb([self.round, rows]))
        return hashlib.sha256(b"shoal/verification/1/table\x00" + packed).digest()

    def base(self) -> Table:
        """Copy the standings without the rulings, to keep them when the records of their rounds are
        forgotten; at most `MOST_STANDINGS`, those who did least go first.
        """

        def deeds(peer: str) -> tuple[int, int, str]:
            standing = self.standings[peer]
            return standing.bans, sum((*standing.claims.values(), *standing.votes.values())), peer

        kept = sorted(self.standings, key=deeds)[-MOST_STANDINGS:]
        copies = {peer: Standing.of(self.standings[peer].row) for peer in sorted(kept)}
        return Table(self.round, copies, {})


def compute_scores(
    ledger: Ledger,
    electorates: Electorates,
    rules: Rules,
    prices: ScoreRules,
    round: int,
    base: Table | None = None,
) -> Table:
    """Compute the table at the end of ``round``; claims of later rounds do not count yet.

    With ``base``, the table of an earlier round, claims up to that round count through it, and
    their records are not needed any more.
    """
    standings: defaultdict[str, Standing] = defaultdict(Standing)
    last = -1
    if base is not None:
        standings.update(base.base().standings)
        last = base.round
    rulings: dict[bytes, Ruling] = {}
    claims = [claim for claim in ledger.claims() if last < claim.round <= round]
    for now, published in itertools.groupby(claims, key=lambda claim: claim.round):
        for standing in standings.values():
            _fade(standing, now - last, prices)
        banned = set()
        for peer, standing in standings.items():
            if standing.until is not None and standing.until >= now:
                banned.add(peer)
        changes: defaultdict[str, int] = defaultdict(int)
        absences: defaultdict[str, int] = defaultdict(int)
        for claim in published:
            if claim.peer in banned:
                continue
            ruling = rule(claim, ledger, electorates, rules, banned)
            rulings[claim.id] = ruling
            for peer, of_score, of_absence in _consequences(ruling, standings, prices):
                changes[peer] += of_score
                absences[peer] += of_absence
        for peer, change in changes.items():
            if peer not in banned:
                _apply(standings[peer], change, now, prices)
        for peer, change in absences.items():
            absence = standings[peer].absence + change
            standings[peer].absence = min(max(absence, 0), MOST_ABSENCE)
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
    if ruling.outcome != "unverified":
        yield author, _change_of_author(ruling, prices), 0
    for trial in ruling.trials:
        for peer, mark in zip(trial.verifiers, trial.marks, strict=True):
            if mark is None or (mark != "withheld" and ruling.outcome == "unverified"):
                continue
            kind = _kind(mark, ruling)
            change = 0 if kind == "absent" else int(getattr(prices, kind))
            if peer in trial.contradicted and change > prices.withheld:
                kind = "withheld"
                change = prices.withheld
            standings[peer].votes[kind] += 1
            yield peer, change, _change_of_absence(mark, prices)
    if ruling.appeal is not None:
        kind = "won" if ruling.overturned else "lost"
        standings[ruling.appeal.peer].appeals[kind] += 1
        yield ruling.appeal.peer, int(getattr(prices, kind)), 0


def _change_of_author(ruling: Ruling, prices: ScoreRules) -> int:
    if ruling.outcome == "invalid":
        return prices.upheld if ruling.planted else prices.rejected
    # A planted claim that was found valid was to be wrong: it earns nothing.
    return 0 if ruling.opened else prices.upheld


def _change_of_absence(mark: Mark, prices: ScoreRules) -> int:
    if mark == "absent":
        return prices.absent
    return 0 if mark == "withheld" else -prices.present


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
        standing.absence = standing.absence * (ABSENCE_FADE - 1) // ABSENCE_FADE
        sign = 1 if standing.score > 0 else -1
        standing.score = sign * (abs(standing.score) * (prices.fade - 1) // prices.fade)


def _apply(standing: Standing, change: int, now: int, prices: ScoreRules) -> None:
    standing.score = min(standing.score + change, prices.ceiling)
    if standing.score <= prices.floor:
        times = 2 ** min(standing.bans, 32)
        standing.until = now + min(prices.ban * times, prices.longest)
        standing.bans += 1
        standing.score = prices.floor // 2  # probation
