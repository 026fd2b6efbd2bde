"""History of the claims that this node checked, as odds against each author; and when they are
reason enough for a vote.

A claim counts once its round is settled, unless its author had to make it wrong. When the odds
reach the alarm, this node says so: in the evidence of its votes, where all can read it. It votes
against the author's further claims only while more than half of the operators whose votes on that
author are on record, at least three of them, state an alarm, and its own odds do not speak for the
author. So one verifier that invents evidence changes nothing, all honest verifiers begin to refuse
at about the same time, and the ban follows from their votes as any other. After a ban, a peer's
odds begin anew.
"""

from __future__ import annotations

import json
import logging
import math
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

from shoal.node.verify.audit import Finding, Measured, VerifyError
from shoal.swarm.p2p.newest import Newest
from shoal.verification.calibration import Pair
from shoal.verification.consensus.ledger import Ledger
from shoal.verification.consensus.odds import least_audit, vote
from shoal.verification.consensus.records import Claim, Reveal
from shoal.verification.consensus.reputation import Table
from shoal.verification.consensus.rulings import Electorates, operator
from shoal.verification.sequential import ALARM, LENGTH, LIFE_RATE, Reference, Series

# File of the series of all peers, ``evidence.sqlite`` in a node's folder: each claim as it was
# counted, so that a node that starts again goes on where it was, and people can see from which
# claims a verdict follows.
#
# It holds at most `PEERS` peers; the one with the least odds against it makes room. Of a series
# that is over, only a summary stays.

NAME = "evidence.sqlite"
PEERS, SERIES = 256, 16
"""Peers that are kept, and series of each."""
WAIT_S = 5.0  # for another process that reads
_TABLES = """
CREATE TABLE IF NOT EXISTS series (
    peer TEXT, number INTEGER, last INTEGER, log_odds REAL, row TEXT,
    PRIMARY KEY (peer, number));
CREATE TABLE IF NOT EXISTS claims (
    peer TEXT, number INTEGER, place INTEGER, claim TEXT, row TEXT,
    PRIMARY KEY (peer, number, place));
CREATE INDEX IF NOT EXISTS by_claim ON claims (peer, claim);
"""


@dataclass(frozen=True)
class SeriesRow:
    """Series ``number`` of a peer.

    ``bans``: how many it had before. ``log_odds``: the highest, as a natural logarithm;
    ``first`` and ``last``: rounds of its claims; ``calibration``: the digest of the calibrated
    claims.
    """

    number: int
    bans: int
    pair: Pair
    features: tuple[str, ...]
    calibration: str
    claims: int
    first: int
    last: int
    log_odds: float


@dataclass(frozen=True)
class ClaimRow:
    """Claim in a series, by its hex id: what was measured, the odds after it, and by what its
    author says to have computed.
    """

    claim: str
    round: int
    log_odds: float
    scores: tuple[float, ...]
    tolerances: tuple[float, ...]
    p: tuple[float, ...]
    kernel: str = ""


class EvidenceFile:
    """File at ``path``, made with the first claim.

    All methods raise VerifyError if it cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    def peers(self) -> list[str]:
        with self._open() as database:
            return [
                peer
                for (peer,) in database.execute("SELECT DISTINCT peer FROM series ORDER BY peer")
            ]

    def series(self, peer: str) -> list[SeriesRow]:
        """Return the series of ``peer``, the oldest first."""
        with self._open() as database:
            found = database.execute(
                "SELECT row FROM series WHERE peer = ? ORDER BY number", (peer,)
            ).fetchall()
            rows = [json.loads(text) for (text,) in found]
            return [
                SeriesRow(
                    **{**row, "pair": Pair(**row["pair"]), "features": tuple(row["features"])}
                )
                for row in rows
            ]

    def claims(self, peer: str, number: int) -> list[ClaimRow]:
        """Return the claims of a series in order; none of one that is over."""
        with self._open() as database:
            found = database.execute(
                "SELECT row FROM claims WHERE peer = ? AND number = ? ORDER BY place",
                (peer, number),
            )
            rows = [json.loads(text) for (text,) in found]
            return [ClaimRow(*row[:3], *map(tuple, row[3:6]), *row[6:]) for row in rows]

    def knows(self, peer: str, claim: str) -> bool:
        with self._open() as database:
            return (
                database.execute(
                    "SELECT 1 FROM claims WHERE peer = ? AND claim = ?", (peer, claim)
                ).fetchone()
                is not None
            )

    def add(self, peer: str, series: SeriesRow, claim: ClaimRow) -> None:
        """Store ``claim`` as number ``series.claims`` of ``series``, which is as it is after it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._open(create=True) as database:
            known = {known for (known,) in database.execute("SELECT DISTINCT peer FROM series")}
            if peer not in known and len(known) >= PEERS:
                least = (
                    "SELECT peer FROM series GROUP BY peer ORDER BY MAX(log_odds), MAX(last) "
                    "LIMIT 1"
                )
                leaving = database.execute(least).fetchone()
                database.execute("DELETE FROM series WHERE peer = ?", leaving)
                database.execute("DELETE FROM claims WHERE peer = ?", leaving)
            if series.claims == 1:  # those of its kind before it are over
                for row in self.series(peer):
                    if row.pair == series.pair:
                        database.execute(
                            "DELETE FROM claims WHERE peer = ? AND number = ?", (peer, row.number)
                        )
                for table in ("series", "claims"):
                    database.execute(
                        f"DELETE FROM {table} WHERE peer = ? AND number <= ?",
                        (peer, series.number - SERIES),
                    )
            place = (peer, series.number)
            text = json.dumps(asdict(series))
            database.execute(
                "INSERT OR REPLACE INTO series VALUES (?, ?, ?, ?, ?)",
                (*place, series.last, series.log_odds, text),
            )
            text = json.dumps(astuple(claim))
            database.execute(
                "INSERT INTO claims VALUES (?, ?, ?, ?, ?)",
                (*place, series.claims, claim.claim, text),
            )

    @contextmanager
    def _open(self, create: bool = False) -> Iterator[sqlite3.Connection]:
        if not create and not self.path.exists():
            with closing(sqlite3.connect(":memory:")) as empty:
                empty.executescript(_TABLES)
                yield empty
            return
        try:
            with closing(sqlite3.connect(self.path, timeout=WAIT_S)) as database, database:
                if create:
                    database.executescript(_TABLES)
                yield database
        except (sqlite3.Error, OSError, ValueError, TypeError) as error:
            raise VerifyError(
                f"The evidence in {str(self.path)!r} cannot be used ({error}): free space, or move "
                "the file away."
            ) from error


def is_open(series: SeriesRow, pair: Pair, calibration: str, bans: int) -> bool:
    """Return whether another claim of ``pair`` belongs to ``series``."""
    return (series.pair, series.calibration, series.bans) == (
        pair,
        calibration,
        bans,
    ) and series.claims < LENGTH


# Odds that verifiers state about a peer when they reveal their votes on its claims; the same for
# all who hold the same records.

FIELD = "odds"
"""Name of the odds in a reveal's evidence."""
MOST_LOG = 69.0  # odds of 1e30 say enough


def stated(table: Table, ledger: Ledger, electorates: Electorates) -> dict[str, dict[str, float]]:
    """Return the newest stated odds, as natural logarithms: by author, then by the verifier's
    operator.

    Only votes that count are read, so nobody speaks who was not drawn, and an operator speaks once,
    whatever its number of peers.
    """
    found: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for ruling in sorted(
        table.rulings.values(), key=lambda ruling: (ruling.claim.round, ruling.claim.id)
    ):
        claim = ruling.claim
        electorate = electorates.get(ruling.claim.round)
        last = len(ruling.trials) - 1
        for attempt, trial in enumerate(ruling.trials):
            case, number = (
                (claim.id, attempt)
                if ruling.appeal is None or attempt < last
                else (ruling.appeal.id, 0)
            )
            for peer, mark in zip(trial.verifiers, trial.marks, strict=True):
                reveals = (
                    ledger.ballots(Reveal, case, number, peer)
                    if mark in ("valid", "invalid")
                    else []
                )
                said = _carried(reveals[0].evidence) if len(reveals) == 1 else None
                if said is not None:
                    found[claim.peer][operator(electorate, peer) if electorate else peer] = said
    return dict(found)


def _carried(evidence: bytes) -> float | None:
    """Return the logarithm of the odds in a stranger's evidence; None if it states none."""
    try:
        said = json.loads(evidence)
        odds = said.get(FIELD) if isinstance(said, dict) else None
        number = (
            float(odds)
            if isinstance(odds, (int, float)) and not isinstance(odds, bool)
            else math.nan
        )
    except (ValueError, RecursionError, OverflowError):
        return None
    return min(math.log(number), MOST_LOG) if 0 < number < math.inf else None


log = logging.getLogger(__name__)

LEAST = 3  # operators that must have stated something
MOST_WAITING = 4096  # checked claims whose round is not settled
MOST_OPEN = 512  # series in memory; others are read again


class History:
    """History in the file ``path``, of a node run by ``operator``. For one thread."""

    def __init__(self, path: Path, operator: str) -> None:
        self._file = EvidenceFile(path)
        self._operator = operator
        self._waiting = Newest[bytes, tuple[Claim, tuple[Measured, ...]]](MOST_WAITING)
        self._open = Newest[tuple[str, Pair], tuple[Series, SeriesRow]](MOST_OPEN)
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
        finding = replace(
            finding, statistics={FIELD: math.exp(min(own, MOST_LOG)), **finding.statistics}
        )
        others = [
            odds
            for operator, odds in self._stated.get(claim.peer, {}).items()
            if operator != self._operator
        ]
        alarmed = sum(odds >= ALARM for odds in (own, *others))
        if (
            not finding.accepted
            or own < 0
            or 1 + len(others) < LEAST
            or 2 * alarmed <= 1 + len(others)
        ):
            return finding
        reason = (
            f"Taken together, this peer's claims are not those of an honest one: {alarmed} of "
            f"{1 + len(others)} verifiers find so, this one with odds of "
            f"{math.exp(min(own, MOST_LOG)):.3g} to 1."
        )
        return replace(finding, accepted=False, reason=reason)

    def settle(self, table: Table, ledger: Ledger, electorates: Electorates) -> list[str]:
        """Count the claims that ``table`` has settled, read what others state; return the peers
        about whom that raises an alarm.
        """
        self._stated = stated(table, ledger, electorates)
        # A claim of the round that banned its author still belongs to the odds before the ban.
        self._table, newest = (table if self._table.round < 0 else self._table), table
        alarms = []
        due = [entry for entry in self._waiting.values() if entry[0].round <= table.round]
        for claim, measured in sorted(
            due, key=lambda entry: (entry[0].round, entry[0].slot, entry[0].id)
        ):
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
        return max(
            0 if standing is None else standing.bans, max((row.bans for row in rows), default=0)
        )

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
            if found is None or not is_open(found[1], one.pair, reference.digest, bans):
                found = self._resumed(claim.peer, reference, rows, bans)
            series, row = found
            scores = reference.scores(one.evidence)
            tolerances = reference.tolerances(one.evidence)
            p = series.add(scores, tolerances)
            odds = series.log_odds
            row = replace(
                row,
                claims=row.claims + 1,
                first=row.first if row.claims else claim.round,
                last=claim.round,
                log_odds=max(row.log_odds, odds) if row.claims else odds,
            )
            self._file.add(
                claim.peer,
                row,
                ClaimRow(claim.id.hex(), claim.round, odds, scores, tolerances, p, one.kernel),
            )
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
        return Series(reference, number), SeriesRow(
            number, bans, reference.pair, names, reference.digest, 0, 0, 0, 0.0
        )


# The table of ``shoal verify odds``, from `shoal.verification.consensus.rulings`.

MORE = (1, 3, 5, 7, 9)  # numbers of verifiers to compare with


def odds_report(
    verifiers: int,
    collude: float,
    lazy: float,
    miss: float,
    alarm: float,
    population: int | None,
    audit: float | None,
    gain: float,
    penalty: float,
) -> dict[str, Any]:
    """Return the object that the command prints with ``--json``.

    Raises ValueError for an impossible draw, as of an even number.
    """
    rows = []
    for n in sorted(
        {verifiers, *MORE}
        if population is None
        else {verifiers, *(n for n in MORE if n <= population)}
    ):
        found = vote(n, collude, lazy=lazy, miss=miss, alarm=alarm, population=population)
        rows.append(
            {
                "n": n,
                "wrong_accepted": found.wrong_accepted,
                "honest_rejected": found.honest_rejected,
            }
        )
    mine = next(row for row in rows if row["n"] == verifiers)
    detected = 1 - mine["wrong_accepted"]
    least = least_audit(gain, penalty, detected) if detected > 0 else float("inf")
    paying = {} if audit is None else {"audit": audit, "cheating_pays": bool(audit <= least)}
    given = {
        "collude": collude,
        "lazy": lazy,
        "miss": miss,
        "alarm": alarm,
        "population": population,
        "gain": gain,
    }
    return {
        **mine,
        **given,
        "penalty": penalty,
        "least_audit": least if detected > 0 else None,
        **paying,
        "table": rows,
    }


def odds_table(report: dict[str, Any]) -> str:
    lines = [f"{'verifiers':>9}  {'wrong accepted':>14}  {'honest rejected':>15}"]
    lines += [
        f"{row['n']:>9}  {row['wrong_accepted']:>14.3%}  {row['honest_rejected']:>15.3%}"
        for row in report["table"]
    ]
    least = report["least_audit"]
    if least is None or least > 1:
        lines.append(f"with {report['n']} verifiers cheating pays however many claims are checked")
    else:
        lines.append(
            f"with {report['n']} verifiers cheating does not pay if more than {least:.2%} of the "
            "claims are checked"
        )
    if "audit" in report:
        lines.append(
            f"at {report['audit']:.2%} it {'pays' if report['cheating_pays'] else 'does not pay'}"
        )
    return "\n".join(lines)


SHOWN = 12  # newest claims of a series that are shown to people
LEAST_LETTERS = 4


def explain(name: str, folders: Sequence[Path]) -> dict[str, Any]:
    """Return what the nodes in ``folders`` know of the peer whose id is, begins or ends with
    ``name``.

    Raises VerifyError if there is no such peer, or several.
    """
    wanted = name.lstrip("…")
    files = [EvidenceFile(folder / NAME) for folder in folders]
    peers = {
        peer for file in files for peer in file.peers() if peer == wanted or _is_part(peer, wanted)
    }
    if len(peers) != 1:
        where = ", ".join(map(str, folders)) or "runs/*"
        found = (
            f"{len(peers)} peers are called {name!r}"
            if peers
            else f"No claim was counted of {name!r} in {where}"
        )
        raise VerifyError(
            f"{found}: name the peer as `shoal peers` shows it, and a node's folder with --folder."
        )
    peer = peers.pop()
    told = [_told(file, peer) for file in files]
    return {
        "peer": peer,
        "alarm_at": round(1 / LIFE_RATE),
        "nodes": [one for one in told if one["series"]],
    }


def _is_part(peer: str, part: str) -> bool:
    return len(part) >= LEAST_LETTERS and (peer.startswith(part) or peer.endswith(part))


def _told(file: EvidenceFile, peer: str) -> dict[str, Any]:
    rows = file.series(peer)
    bans = max((row.bans for row in rows), default=0)
    highest = max((row.log_odds for row in rows if row.bans == bans), default=0.0)
    series = [_series(row, file.claims(peer, row.number)) for row in rows]
    return {
        "folder": str(file.path.parent),
        "alarm": highest >= ALARM,
        "odds": _odds(highest),
        "bans": bans,
        "series": series,
    }


def _series(row: SeriesRow, claims: Sequence[ClaimRow]) -> dict[str, Any]:
    return {
        "number": row.number,
        "bans": row.bans,
        **asdict(row.pair),
        "calibration": row.calibration[:16],
        "claims": row.claims,
        "first_round": row.first,
        "last_round": row.last,
        "odds": _odds(row.log_odds),
        "counted": [
            {
                "claim": one.claim,
                "round": one.round,
                "kernel": one.kernel,
                "p": dict(zip(row.features, one.p, strict=True)),
                "odds": _odds(one.log_odds),
            }
            for one in claims
        ],
    }


def _odds(log_odds: float) -> float:
    return math.exp(min(log_odds, 700.0))


def summary(report: Mapping[str, Any]) -> str:
    lines = [f"peer {report['peer']}; an alarm at odds of {report['alarm_at']:,} to 1"]
    for node in report["nodes"]:
        decided = "an alarm" if node["alarm"] else "no alarm"
        lines.append(
            f"{node['folder']}: {decided}, odds of {node['odds']:.3g} to 1 against it (after "
            f"{node['bans']} bans)"
        )
        for series in node["series"]:
            lines.append(
                f"  {series['number']}. {series['fingerprint']} of {series['model']}, "
                f"{series['prover']} checked in {series['verifier']}: {series['claims']} claims of "
                f"rounds {series['first_round']} to {series['last_round']}, odds up to "
                f"{series['odds']:.3g}{'' if series['counted'] else ' (over)'}"
            )
            for one in series["counted"][-SHOWN:]:
                feature, p = min(one["p"].items(), key=lambda item: item[1])
                by = f"  by {one['kernel']}" if one["kernel"] else ""
                lines.append(
                    f"     {one['claim'][:12]}  round {one['round']}  odds {one['odds']:.3g}  p "
                    f"{p:.3g} of {feature}{by}"
                )
    return "\n".join(lines)
