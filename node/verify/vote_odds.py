"""Work of ``shoal verify odds``: how often drawn verifiers err, from
`shoal.verification.consensus.odds`.
"""

from __future__ import annotations

from typing import Any

from shoal.verification.consensus.odds import least_audit, vote

COMPARED = (1, 3, 5, 7, 9)
"""Numbers of verifiers to compare with."""


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
    numbers = {verifiers}
    for n in COMPARED:
        if population is None or n <= population:
            numbers.add(n)
    rows = []
    for n in sorted(numbers):
        found = vote(n, collude, lazy=lazy, miss=miss, alarm=alarm, population=population)
        row = {
            "n": n,
            "wrong_accepted": found.wrong_accepted,
            "honest_rejected": found.honest_rejected,
        }
        rows.append(row)
    mine = next(row for row in rows if row["n"] == verifiers)
    detected = 1 - mine["wrong_accepted"]
    least = least_audit(gain, penalty, detected) if detected > 0 else float("inf")
    paying = {} if audit is None else {"audit": audit, "cheating_pays": bool(audit <= least)}
    return {
        **mine,
        "collude": collude,
        "lazy": lazy,
        "miss": miss,
        "alarm": alarm,
        "population": population,
        "gain": gain,
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
