"""File of the series of all peers, ``evidence.sqlite`` in a node's folder: each claim as it was counted, so that a node that starts
again goes on where it was, and people can see from which claims a verdict follows.

It holds at most `PEERS` peers; the one with the least odds against it makes room. Of a series that is over, only a summary stays.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

from shoal.node.verify.audit.errors import VerifyError
from shoal.verification.calibration.calibration import Pair
from shoal.verification.sequential.series import LENGTH

NAME = "evidence.sqlite"
PEERS, SERIES = 256, 16
"""Peers that are kept, and series of each."""
WAIT_S = 5.0  # for another process that reads
_TABLES = """
CREATE TABLE IF NOT EXISTS series (peer TEXT, number INTEGER, last INTEGER, log_odds REAL, row TEXT, PRIMARY KEY (peer, number));
CREATE TABLE IF NOT EXISTS claims (
    peer TEXT, number INTEGER, place INTEGER, claim TEXT, row TEXT, PRIMARY KEY (peer, number, place));
CREATE INDEX IF NOT EXISTS by_claim ON claims (peer, claim);
"""


@dataclass(frozen=True)
class SeriesRow:
    """Series ``number`` of a peer. ``bans``: how many it had before. ``log_odds``: the highest, as a natural logarithm;
    ``first`` and ``last``: rounds of its claims; ``calibration``: the digest of the calibrated claims.
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
    """Claim in a series, by its hex id: what was measured, the odds after it, and by what its author says to have computed."""

    claim: str
    round: int
    log_odds: float
    scores: tuple[float, ...]
    tolerances: tuple[float, ...]
    p: tuple[float, ...]
    kernel: str = ""


class EvidenceFile:
    """File at ``path``, made with the first claim. All methods raise VerifyError if it cannot be read or written."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    def peers(self) -> list[str]:
        """Return all peers that it knows."""
        with self._open() as database:
            return [peer for (peer,) in database.execute("SELECT DISTINCT peer FROM series ORDER BY peer")]

    def series(self, peer: str) -> list[SeriesRow]:
        """Return the series of ``peer``, the oldest first."""
        with self._open() as database:
            found = database.execute("SELECT row FROM series WHERE peer = ? ORDER BY number", (peer,)).fetchall()
            rows = [json.loads(text) for (text,) in found]
            return [SeriesRow(**{**row, "pair": Pair(**row["pair"]), "features": tuple(row["features"])}) for row in rows]

    def claims(self, peer: str, number: int) -> list[ClaimRow]:
        """Return the claims of a series in order; none of one that is over."""
        with self._open() as database:
            found = database.execute("SELECT row FROM claims WHERE peer = ? AND number = ? ORDER BY place", (peer, number))
            rows = [json.loads(text) for (text,) in found]
            return [ClaimRow(*row[:3], *map(tuple, row[3:6]), *row[6:]) for row in rows]

    def knows(self, peer: str, claim: str) -> bool:
        """Return whether the claim was counted."""
        with self._open() as database:
            return database.execute("SELECT 1 FROM claims WHERE peer = ? AND claim = ?", (peer, claim)).fetchone() is not None

    def add(self, peer: str, series: SeriesRow, claim: ClaimRow) -> None:
        """Store ``claim`` as number ``series.claims`` of ``series``, which is as it is after it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._open(create=True) as database:
            known = {known for (known,) in database.execute("SELECT DISTINCT peer FROM series")}
            if peer not in known and len(known) >= PEERS:
                least = "SELECT peer FROM series GROUP BY peer ORDER BY MAX(log_odds), MAX(last) LIMIT 1"
                leaving = database.execute(least).fetchone()
                database.execute("DELETE FROM series WHERE peer = ?", leaving)
                database.execute("DELETE FROM claims WHERE peer = ?", leaving)
            if series.claims == 1:  # those of its kind before it are over
                for row in self.series(peer):
                    if row.pair == series.pair:
                        database.execute("DELETE FROM claims WHERE peer = ? AND number = ?", (peer, row.number))
                for table in ("series", "claims"):
                    database.execute(f"DELETE FROM {table} WHERE peer = ? AND number <= ?", (peer, series.number - SERIES))
            place, text = (peer, series.number), json.dumps(asdict(series))
            database.execute("INSERT OR REPLACE INTO series VALUES (?, ?, ?, ?, ?)", (*place, series.last, series.log_odds, text))
            text = json.dumps(astuple(claim))
            database.execute("INSERT INTO claims VALUES (?, ?, ?, ?, ?)", (*place, series.claims, claim.claim, text))

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
                f"The evidence in {str(self.path)!r} cannot be used ({error}): free space, or move the file away."
            ) from error


def is_open(series: SeriesRow, pair: Pair, calibration: str, bans: int) -> bool:
    """Return whether another claim of ``pair`` belongs to ``series``."""
    return (series.pair, series.calibration, series.bans) == (pair, calibration, bans) and series.claims < LENGTH
