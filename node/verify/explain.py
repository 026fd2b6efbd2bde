"""Work of ``shoal verify explain``: what nodes on this machine know of a peer, from all of its
claims that they checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal.node.verify.errors import VerifyError
from shoal.node.verify.evidence_file import NAME, ClaimRow, EvidenceFile, SeriesRow
from shoal.verification.sequential import ALARM, LIFE_RATE

SHOWN_CLAIMS = 12
"""The newest of a series, for people."""
LEAST_LETTERS = 4
"""Of an id that name a peer."""
MAX_LOG_ODDS = 700.0
"""The largest exponent of a float is 709."""


def explain(name: str, folders: Sequence[Path]) -> dict[str, Any]:
    """Return what the nodes in ``folders`` know of the peer whose id is, begins or ends with
    ``name``.

    Raises VerifyError if there is no such peer, or several.
    """
    wanted = name.lstrip("…")
    files = [EvidenceFile(folder / NAME) for folder in folders]
    peers: set[str] = set()
    for file in files:
        for peer in file.peers():
            if peer == wanted or _is_part(peer, wanted):
                peers.add(peer)
    if len(peers) != 1:
        where = ", ".join(map(str, folders)) or "runs/*"
        found = f"No claim was counted of {name!r} in {where}"
        if peers:
            found = f"{len(peers)} peers are called {name!r}"
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
        "counted": [_counted(row, claim) for claim in claims],
    }


def _counted(row: SeriesRow, claim: ClaimRow) -> dict[str, Any]:
    return {
        "claim": claim.claim,
        "round": claim.round,
        "kernel": claim.kernel,
        "p": dict(zip(row.features, claim.p, strict=True)),
        "odds": _odds(claim.log_odds),
    }


def _odds(log_odds: float) -> float:
    return math.exp(min(log_odds, MAX_LOG_ODDS))


def summary(report: Mapping[str, Any]) -> str:
    lines = [f"peer {report['peer']}; an alarm at odds of {report['alarm_at']:,} to 1"]
    for node in report["nodes"]:
        decided = "an alarm" if node["alarm"] else "no alarm"
        lines.append(
            f"{node['folder']}: {decided}, odds of {node['odds']:.3g} to 1 against it (after "
            f"{node['bans']} bans)"
        )
        for series in node["series"]:
            lines.append(_series_line(series))
            lines += map(_claim_line, series["counted"][-SHOWN_CLAIMS:])
    return "\n".join(lines)


def _series_line(series: Mapping[str, Any]) -> str:
    over = "" if series["counted"] else " (over)"
    return (
        f"  {series['number']}. {series['fingerprint']} of {series['model']}, {series['prover']} "
        f"checked in {series['verifier']}: {series['claims']} claims of rounds "
        f"{series['first_round']} to {series['last_round']}, odds up to {series['odds']:.3g}{over}"
    )


def _claim_line(claim: Mapping[str, Any]) -> str:
    feature, p = min(claim["p"].items(), key=lambda item: item[1])
    by = f"  by {claim['kernel']}" if claim["kernel"] else ""
    return (
        f"     {claim['claim'][:12]}  round {claim['round']}  odds {claim['odds']:.3g}  p {p:.3g} "
        f"of {feature}{by}"
    )
