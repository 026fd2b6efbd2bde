"""The file of all peers' series, ``evidence.sqlite`` in a node's folder.

It has each claim as it was counted, so that a node that starts again goes on where it was, and
people can see from which claims a verdict follows.

It holds at most `MAX_PEERS` peers; the one with the least odds against it makes room. Of a series
that is over, only a summary stays.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

from shoal.node.verify.errors import VerifyError
from shoal.verification.calibration import Pair
from shoal.verification.sequential import LENGTH

NAME = "evidence.sqlite"
MAX_PEERS = 256
MAX_SERIES = 16
"""Of each peer."""
WAIT_S = 5.0
"""For another process that reads."""
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
            found = database.execute("SELECT DISTINCT peer FROM series ORDER BY peer")
            return [peer for (peer,) in found]

    def series(self, peer: str) -> list[SeriesRow]:
        """Return the series of ``peer``, the oldest first."""
        with self._open() as database:
            found = database.execute(
                "SELECT row FROM series WHERE peer = ? ORDER BY number", (peer,)
            ).fetchall()
            rows: list[SeriesRow] = []
            for (text,) in found:
                fields = json.loads(text)
                fields["pair"] = Pair(**fields["pair"])
                fields["features"] = tuple(fields["features"])
                rows.append(SeriesRow(**fields))
            return rows

    def claims(self, peer: str, number: int) -> list[ClaimRow]:
        """Return the claims of a series in order; none of one that is over."""
        with self._open() as database:
            found = database.execute(
                "SELECT row FROM claims WHERE peer = ? AND number = ? ORDER BY place",
                (peer, number),
            )
            rows: list[ClaimRow] = []
            for (text,) in found:
                # Older files have no kernel.
                claim, round, log_odds, *measured = json.loads(text)
                scores, tolerances, p = map(tuple, measured[:3])
                rows.append(ClaimRow(claim, round, log_odds, scores, tolerances, p, *measured[3:]))
            return rows

    def knows(self, peer: str, claim: str) -> bool:
        with self._open() as database:
            found = database.execute(
                "SELECT 1 FROM claims WHERE peer = ? AND claim = ?", (peer, claim)
            )
            return found.fetchone() is not None

    def add(self, peer: str, series: SeriesRow, claim: ClaimRow) -> None:
        """Store ``claim`` as number ``series.claims`` of ``series``, which is as it is after it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._open(create=True) as database:
            self._make_room(database, peer)
            if series.claims == 1:
                self._end_others(database, peer, series)
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

    def _make_room(self, database: sqlite3.Connection, peer: str) -> None:
        """Drop the peer with the least odds against it if there is no room for ``peer``."""
        known = {known for (known,) in database.execute("SELECT DISTINCT peer FROM series")}
        if peer in known or len(known) < MAX_PEERS:
            return
        least = "SELECT peer FROM series GROUP BY peer ORDER BY MAX(log_odds), MAX(last) LIMIT 1"
        leaving = database.execute(least).fetchone()
        database.execute("DELETE FROM series WHERE peer = ?", leaving)
        database.execute("DELETE FROM claims WHERE peer = ?", leaving)

    def _end_others(self, database: sqlite3.Connection, peer: str, series: SeriesRow) -> None:
        """Keep only a summary of the series before ``series`` of its kind, and only the newest."""
        for row in self.series(peer):
            if row.pair == series.pair:
                place = (peer, row.number)
                database.execute("DELETE FROM claims WHERE peer = ? AND number = ?", place)
        oldest = (peer, series.number - MAX_SERIES)
        database.execute("DELETE FROM series WHERE peer = ? AND number <= ?", oldest)
        database.execute("DELETE FROM claims WHERE peer = ? AND number <= ?", oldest)

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
    is_same = (series.pair, series.calibration, series.bans) == (pair, calibration, bans)
    return is_same and series.claims < LENGTH
