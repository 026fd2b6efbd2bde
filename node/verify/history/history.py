"""History of the claims that this node checked, as odds against each author; and when they are reason enough for a vote.

A claim counts once its round is settled, unless its author had to make it wrong. When the odds reach the alarm, this node says so:
in the evidence of its votes, where all can read it. It votes against the author's further claims only while more than half of the
operators whose votes on that author are on record, at least three of them, state an alarm, and its own odds do not speak for the
author. So one verifier that invents evidence changes nothing, all honest verifiers begin to refuse at about the same time, and the
ban follows from their votes as any other. After a ban, a peer's odds begin anew.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.node.verify.audit.errors import VerifyError
from shoal.node.verify.audit.finding import Finding, Measured
from shoal.node.verify.history.file import ClaimRow, EvidenceFile, SeriesRow, is_open
from shoal.node.verify.history.statements import FIELD, MOST_LOG, stated
from shoal.verification.calibration.calibration import Pair
from shoal.verification.consensus.ledger import Ledger
from shoal.verification.consensus.records import Claim
from shoal.verification.consensus.reputation import Table
from shoal.verification.consensus.rulings import Electorates
from shoal.verification.sequential.series import ALARM, Reference, Series

log = logging.getLogger(__name__)

LEAST = 3  # operators that must have stated something
MOST_WAITING = 4096  # checked claims whose round is not settled
MOST_OPEN = 512  # series in memory; others are read again


@dataclass
class _Open:
    """Series with its row in the file."""

    series: Series
    row: SeriesRow


class History:
    """History in the file ``path``, of a node run by ``operator``. For one thread."""

    def __init__(self, path: Path, operator: str) -> None:
        self._file, self._operator = EvidenceFile(path), operator
        self._waiting: OrderedDict[bytes, tuple[Claim, tuple[Measured, ...]]] = OrderedDict()
        self._open: OrderedDict[tuple[str, Pair], _Open] = OrderedDict()
        self._references: dict[Pair, Reference] = {}
        self._stated: dict[str, dict[str, float]] = {}
        self._table = Table(-1, {}, {})

    def weigh(self, claim: Claim, finding: Finding) -> Finding:
        """Return ``finding`` with the odds against the author, refused if these are reason enough; note what it measured."""
        if not finding.measured:
            return finding
        self._waiting[claim.id] = claim, finding.measured
        while len(self._waiting) > MOST_WAITING:
            self._waiting.popitem(last=False)
        own = self.log_odds(claim.peer)
        finding = replace(finding, statistics={FIELD: math.exp(min(own, MOST_LOG)), **finding.statistics})
        others = [odds for operator, odds in self._stated.get(claim.peer, {}).items() if operator != self._operator]
        alarmed = sum(odds >= ALARM for odds in (own, *others))
        if not finding.accepted or own < 0 or 1 + len(others) < LEAST or 2 * alarmed <= 1 + len(others):
            return finding
        reason = (
            f"Taken together, this peer's claims are not those of an honest one: {alarmed} of {1 + len(others)} verifiers find so, "
            f"this one with odds of {math.exp(min(own, MOST_LOG)):.3g} to 1."
        )
        return replace(finding, accepted=False, reason=reason)

    def settle(self, table: Table, ledger: Ledger, electorates: Electorates) -> list[str]:
        """Count the claims that ``table`` has settled, read what others state; return the peers about whom that raises an alarm."""
        self._stated = stated(table, ledger, electorates)
        # A claim of the round that banned its author still belongs to the odds before the ban.
        self._table, newest = (table if self._table.round < 0 else self._table), table
        alarms = []
        due = [entry for entry in self._waiting.values() if entry[0].round <= table.round]
        for claim, measured in sorted(due, key=lambda entry: (entry[0].round, entry[0].slot, entry[0].id)):
            del self._waiting[claim.id]
            ruling = table.rulings.get(claim.id)
            if ruling is None or ruling.opened:  # its author was banned, or had to make it wrong
                continue
            before = self.log_odds(claim.peer)
            try:
                self._count(claim, measured)
            except VerifyError as error:
                log.warning("%s", error)
            if before < ALARM <= self.log_odds(claim.peer):
                alarms.append(claim.peer)
        self._table = newest
        return alarms

    def log_odds(self, peer: str) -> float:
        """Return the highest odds against ``peer`` since its last ban, as a natural logarithm; 0 if nothing was counted."""
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
        return max(0 if standing is None else standing.bans, max((row.bans for row in rows), default=0))

    def _count(self, claim: Claim, measured: tuple[Measured, ...]) -> None:
        if self._file.knows(claim.peer, claim.id.hex()):  # checked again after an appeal
            return
        for one in measured:
            reference = self._references.get(one.pair)
            if reference is None or reference.honest is not one.honest:
                reference = self._references[one.pair] = Reference(one.pair, one.honest)
            place = claim.peer, one.pair
            rows, found = self._file.series(claim.peer), self._open.pop(place, None)
            bans = self._bans(claim.peer, rows)
            if found is None or not is_open(found.row, one.pair, reference.digest, bans):
                found = self._resumed(claim.peer, reference, rows, bans)
            scores, tolerances = reference.scores(one.evidence), reference.tolerances(one.evidence)
            p = found.series.add(scores, tolerances)
            odds, row = found.series.log_odds, found.row
            row = replace(
                row, claims=row.claims + 1, first=row.first if row.claims else claim.round, last=claim.round,
                log_odds=max(row.log_odds, odds) if row.claims else odds,
            )  # fmt: skip
            self._file.add(claim.peer, row, ClaimRow(claim.id.hex(), claim.round, odds, scores, tolerances, p, one.kernel))
            self._open[place] = replace(found, row=row)
            while len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)

    def _resumed(self, peer: str, reference: Reference, rows: Sequence[SeriesRow], bans: int) -> _Open:
        """Return the series that is under way in the file, or a new one."""
        for row in reversed(rows):
            if is_open(row, reference.pair, reference.digest, bans):
                series = Series(reference, row.number)
                for claim in self._file.claims(peer, row.number):
                    series.add(claim.scores, claim.tolerances)
                return _Open(series, row)
        number = 1 + max((row.number for row in rows), default=0)
        names = tuple(feature.name for feature in reference.honest.features)
        return _Open(Series(reference, number), SeriesRow(number, bans, reference.pair, names, reference.digest, 0, 0, 0, 0.0))
