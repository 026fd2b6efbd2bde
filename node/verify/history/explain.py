"""Work of ``shoal verify explain``: what a node on this machine found out about a peer, from which claims, with which odds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.node.verify.audit.finding import VerifyError
from shoal.node.verify.history.history import NAME, ClaimRow, EvidenceFile, SeriesRow
from shoal.verification.consensus.reputation import least_audit, vote
from shoal.verification.sequential.series import ALARM, LIFE_RATE

# The table of ``shoal verify odds``, from `shoal.verification.consensus.reputation`.

MORE = (1, 3, 5, 7, 9)  # numbers of verifiers to compare with


def odds_report(
    verifiers: int, collude: float, lazy: float, miss: float, alarm: float, population: int | None, audit: float | None,
    gain: float, penalty: float,
) -> dict[str, Any]:  # fmt: skip
    """Return the object that the command prints with ``--json``. Raises ValueError for an impossible draw, as of an even number."""
    rows = []
    for n in sorted({verifiers, *MORE} if population is None else {verifiers, *(n for n in MORE if n <= population)}):
        found = vote(n, collude, lazy=lazy, miss=miss, alarm=alarm, population=population)
        rows.append({"n": n, "wrong_accepted": found.wrong_accepted, "honest_rejected": found.honest_rejected})
    mine = next(row for row in rows if row["n"] == verifiers)
    detected = 1 - mine["wrong_accepted"]
    least = least_audit(gain, penalty, detected) if detected > 0 else float("inf")
    paying = {} if audit is None else {"audit": audit, "cheating_pays": bool(audit <= least)}
    given = {"collude": collude, "lazy": lazy, "miss": miss, "alarm": alarm, "population": population, "gain": gain}
    return {**mine, **given, "penalty": penalty, "least_audit": least if detected > 0 else None, **paying, "table": rows}


def odds_table(report: dict[str, Any]) -> str:
    """Format the report for people."""
    lines = [f"{'verifiers':>9}  {'wrong accepted':>14}  {'honest rejected':>15}"]
    lines += [f"{row['n']:>9}  {row['wrong_accepted']:>14.3%}  {row['honest_rejected']:>15.3%}" for row in report["table"]]
    least = report["least_audit"]
    if least is None or least > 1:
        lines.append(f"with {report['n']} verifiers cheating pays however many claims are checked")
    else:
        lines.append(f"with {report['n']} verifiers cheating does not pay if more than {least:.2%} of the claims are checked")
    if "audit" in report:
        lines.append(f"at {report['audit']:.2%} it {'pays' if report['cheating_pays'] else 'does not pay'}")
    return "\n".join(lines)


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
