"""History of the claims that this node checked, as odds against each author; and when they are
reason enough for a vote.

A claim counts once its round is settled, unless its author had to make it wrong. When the odds
reach the alarm, this node says so in the evidence of its votes, where all can read it. It votes
against the author's further claims only while more than half of the operators whose votes on that
author are on record, at least three of them, state an alarm, and its own odds do not speak for the
author. So one verifier that invents evidence changes nothing, all honest verifiers begin to refuse
at about the same time, and the ban follows from their votes as any other. After a ban, a peer's
odds begin anew.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shoal.node.verify.errors import VerifyError
from shoal.node.verify.evidence_file import ClaimRow, EvidenceFile, SeriesRow, is_open
from shoal.node.verify.finding import Finding, Measured
from shoal.node.verify.stated_odds import MAX_LOG_ODDS, ODDS_KEY, stated_odds
from shoal.swarm.p2p.newest import Newest
from shoal.verification.calibration import Pair
from shoal.verification.consensus.ledger import Ledger
from shoal.verification.consensus.records import Claim
from shoal.verification.consensus.reputation import Table
from shoal.verification.consensus.rulings import Electorates
from shoal.verification.sequential import ALARM, Reference, Series

log = logging.getLogger(__name__)

LEAST_OPERATORS = 3
"""That must have stated something."""
MAX_WAITING = 4096
"""Checked claims whose round is not settled."""
MAX_OPEN_SERIES = 512
"""In memory; others are read again."""


class History:
    """History in the file ``path``, of a node run by ``operator``. For one thread."""

    def __init__(self, path: Path, operator: str) -> None:
        self._file = EvidenceFile(path)
        self._operator = operator
        self._waiting = Newest[bytes, tuple[Claim, tuple[Measured, ...]]](MAX_WAITING)
        self._open = Newest[tuple[str, Pair], tuple[Series, SeriesRow]](MAX_OPEN_SERIES)
        self._references: dict[Pair, Reference] = {}
        self._stated: dict[str, dict[str, float]] = {}
        self._table = Table(-1, {}, {})

    def weigh(self, claim: Claim, finding: Finding) -> Finding:
        """Return ``finding`` with the odds against the author, refused if these are reason enough;
        note what it measured.
        """
        if not finding.measured:
            return finding
        self._waiting[claim.id] = claim, finding.measured
        own = self.log_odds(claim.peer)
        shown = math.exp(min(own, MAX_LOG_ODDS))
        finding = replace(finding, statistics={ODDS_KEY: shown, **finding.statistics})
        stated = dict(self._stated.get(claim.peer, {}))
        stated[self._operator] = own
        alarmed = sum(odds >= ALARM for odds in stated.values())
        is_alarm = len(stated) >= LEAST_OPERATORS and 2 * alarmed > len(stated)
        if not finding.accepted or own < 0 or not is_alarm:
            return finding
        reason = (
            f"Taken together, this peer's claims are not those of an honest one: {alarmed} of "
            f"{len(stated)} verifiers find so, this one with odds of {shown:.3g} to 1."
        )
        return replace(finding, accepted=False, reason=reason)

    def settle(self, table: Table, ledger: Ledger, electorates: Electorates) -> list[str]:
        """Count the claims that ``table`` has settled, read what others state; return the peers
        about whom that raises an alarm.
        """
        self._stated = stated_odds(table, ledger, electorates)
        # A claim of the round that banned its author still belongs to the odds before the ban, so
        # the table before counts until all are.
        if self._table.round < 0:
            self._table = table
        due = [entry for entry in self._waiting.values() if entry[0].round <= table.round]
        due.sort(key=lambda entry: (entry[0].round, entry[0].slot, entry[0].id))
        alarms: list[str] = []
        for claim, measured in due:
            del self._waiting[claim.id]
            ruling = table.rulings.get(claim.id)
            # Its author was banned, or had to make it wrong.
            if ruling is None or ruling.opened:
                continue
            before = self.log_odds(claim.peer)
            try:
                self._count(claim, measured)
            except VerifyError as error:
                log.warning("%s", error)
            if before < ALARM <= self.log_odds(claim.peer):
                alarms.append(claim.peer)
        self._table = table
        return alarms

    def log_odds(self, peer: str) -> float:
        """Return the highest odds against ``peer`` since its last ban, as a natural logarithm; 0 if
        nothing was counted.
        """
        try:
            rows = self._file.series(peer)
        except VerifyError as error:
            log.warning("%s", error)
            return 0.0
        bans = self._bans(peer, rows)
        return max((row.log_odds for row in rows if row.bans == bans), default=0.0)

    def _bans(self, peer: str, rows: Sequence[SeriesRow]) -> int:
        """Return how many bans ``peer`` had; after a start the table may not know it yet."""
        standing = self._table.standings.get(peer)
        known = 0 if standing is None else standing.bans
        return max([known, *(row.bans for row in rows)])

    def _count(self, claim: Claim, measured: tuple[Measured, ...]) -> None:
        # It is checked again after an appeal.
        if self._file.knows(claim.peer, claim.id.hex()):
            return
        for one in measured:
            reference = self._references.get(one.pair)
            if reference is None or reference.honest is not one.honest:
                reference = Reference(one.pair, one.honest)
                self._references[one.pair] = reference
            self._count_one(claim, one, reference)

    def _count_one(self, claim: Claim, one: Measured, reference: Reference) -> None:
        """Count ``claim`` in the series of its author that ``reference`` belongs to."""
        place = claim.peer, one.pair
        rows = self._file.series(claim.peer)
        bans = self._bans(claim.peer, rows)
        found = self._open.pop(place, None)
        if found is None or not is_open(found[1], one.pair, reference.digest, bans):
            found = self._resumed(claim.peer, reference, rows, bans)
        series, row = found
        scores = reference.scores(one.evidence)
        tolerances = reference.tolerances(one.evidence)
        p = series.add(scores, tolerances)
        odds = series.log_odds
        is_first = row.claims == 0
        row = replace(
            row,
            claims=row.claims + 1,
            first=claim.round if is_first else row.first,
            last=claim.round,
            log_odds=odds if is_first else max(row.log_odds, odds),
        )
        counted = ClaimRow(claim.id.hex(), claim.round, odds, scores, tolerances, p, one.kernel)
        self._file.add(claim.peer, row, counted)
        self._open[place] = series, row

    def _resumed(
        self, peer: str, reference: Reference, rows: Sequence[SeriesRow], bans: int
    ) -> tuple[Series, SeriesRow]:
        """Return the series that is under way in the file, or a new one, and its row there."""
        for row in reversed(rows):
            if is_open(row, reference.pair, reference.digest, bans):
                series = Series(reference, row.number)
                for claim in self._file.claims(peer, row.number):
                    series.add(claim.scores, claim.tolerances)
                return series, row
        number = 1 + max((row.number for row in rows), default=0)
        names = tuple(feature.name for feature in reference.honest.features)
        row = SeriesRow(number, bans, reference.pair, names, reference.digest, 0, 0, 0, 0.0)
        return Series(reference, number), row
