"""Work of ``shoal verify explain``: what a node on this machine found out about a peer, from which claims, with which odds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.node.verify.audit.errors import VerifyError
from shoal.node.verify.history.file import NAME, ClaimRow, EvidenceFile, SeriesRow
from shoal.verification.sequential.series import ALARM, LIFE_RATE

SHOWN = 12  # newest claims of a series that are shown to people
LEAST_LETTERS = 4


def explain(name: str, folders: Sequence[Path]) -> dict[str, Any]:
    """Return what the nodes in ``folders`` know of the peer whose id is, begins or ends with ``name``.

    Raises VerifyError if there is no such peer, or several.
    """
    wanted = name.lstrip("…")
    files = [EvidenceFile(folder / NAME) for folder in folders]
    peers = {peer for file in files for peer in file.peers() if peer == wanted or _is_part(peer, wanted)}
    if len(peers) != 1:
        where = ", ".join(map(str, folders)) or "runs/*"
        found = f"{len(peers)} peers are called {name!r}" if peers else f"No claim was counted of {name!r} in {where}"
        raise VerifyError(f"{found}: name the peer as `shoal peers` shows it, and a node's folder with --folder.")
    peer = peers.pop()
    told = [_told(file, peer) for file in files]
    return {"peer": peer, "alarm_at": round(1 / LIFE_RATE), "nodes": [one for one in told if one["series"]]}


def _is_part(peer: str, part: str) -> bool:
    return len(part) >= LEAST_LETTERS and (peer.startswith(part) or peer.endswith(part))


def _told(file: EvidenceFile, peer: str) -> dict[str, Any]:
    rows = file.series(peer)
    bans = max((row.bans for row in rows), default=0)
    highest = max((row.log_odds for row in rows if row.bans == bans), default=0.0)
    series = [_series(row, file.claims(peer, row.number)) for row in rows]
    return {"folder": str(file.path.parent), "alarm": highest >= ALARM, "odds": _odds(highest), "bans": bans, "series": series}


def _series(row: SeriesRow, claims: Sequence[ClaimRow]) -> dict[str, Any]:
    pair = row.pair
    about = {"fingerprint": pair.fingerprint, "model": pair.model, "prover": pair.prover, "verifier": pair.verifier}
    found = {"claims": row.claims, "first_round": row.first, "last_round": row.last, "odds": _odds(row.log_odds)}
    return {
        "number": row.number, "bans": row.bans, **about, "calibration": row.calibration[:16], **found,
        "counted": [
            {
                "claim": one.claim, "round": one.round, "kernel": one.kernel,
                "p": dict(zip(row.features, one.p, strict=True)), "odds": _odds(one.log_odds),
            }
            for one in claims
        ],
    }  # fmt: skip


def _odds(log_odds: float) -> float:
    return math.exp(min(log_odds, 700.0))


def summary(report: Mapping[str, Any]) -> str:
    """Format the report for people."""
    lines = [f"peer {report['peer']}; an alarm at odds of {report['alarm_at']:,} to 1"]
    for node in report["nodes"]:
        decided = "an alarm" if node["alarm"] else "no alarm"
        lines.append(f"{node['folder']}: {decided}, odds of {node['odds']:.3g} to 1 against it (after {node['bans']} bans)")
        for series in node["series"]:
            lines.append(
                f"  {series['number']}. {series['fingerprint']} of {series['model']}, {series['prover']} checked in "
                f"{series['verifier']}: {series['claims']} claims of rounds {series['first_round']} to {series['last_round']}, "
                f"odds up to {series['odds']:.3g}{'' if series['counted'] else ' (over)'}"
            )
            for one in series["counted"][-SHOWN:]:
                feature, p = min(one["p"].items(), key=lambda item: item[1])
                by = f"  by {one['kernel']}" if one["kernel"] else ""
                lines.append(f"     {one['claim'][:12]}  round {one['round']}  odds {one['odds']:.3g}  p {p:.3g} of {feature}{by}")
    return "\n".join(lines)
