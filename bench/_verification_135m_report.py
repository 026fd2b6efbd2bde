"""What the kept evidence of bench/verification_135m.py says: refused claims with intervals, claims
until an alarm, and costs.

A claim is refused if either fingerprint is beyond its threshold at ``RATE``, as a node refuses it.
Honest claims are tested in two halves, each with thresholds from the other; the rest with those of
all honest claims of the pair. A peer's claims are drawn from those measured: an honest peer's and
its calibration without replacement, others' with it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from bench import _verification_sequential as sequential
from bench._interval import rate_interval
from bench._verification_135m import CHEATS, HONEST, SIDES, TOKENS, VARIANTS
from bench._verification_claims import ACTIVATIONS, SAMPLING
from shoal.verification.calibration import FEWEST, Calibration, Pair
from shoal.verification.fingerprints.fingerprint import Evidence
from shoal.verification.sequential import ALARM

RATE = 1e-4
PAIRS = [(prover, verifier) for prover in SIDES for verifier in SIDES]
TOGETHER = 4  # claims that are tested as one, too
DECLARED = "computes in bf16, says fp32"
LARGEST = len(SAMPLING.features) - 1  # of a whole claim, not of a window
LIFE, PEERS = 256, 40  # most claims of a simulated peer, and peers
Rows = Sequence[Sequence[float]]


def evidence(rows: Rows) -> dict[str, Evidence]:
    """Evidence of one claim, of a window for each of ``rows``, by fingerprint."""
    states, drawn = ([tuple(row[part]) for row in rows] for part in sequential.PARTS)
    largest, sizes = max(row[LARGEST] for row in drawn), (1.0,) * len(rows)
    return {
        ACTIVATIONS.name: Evidence(ACTIVATIONS.features, tuple(states), sizes),
        SAMPLING.name: Evidence(
            SAMPLING.features, tuple((*row[:LARGEST], largest) for row in drawn), sizes
        ),
    }


def claims_of(rows: Rows, together: int) -> list[dict[str, Evidence]]:
    """Claims of ``together`` windows each; what is left over is no claim."""
    return [
        evidence(rows[at : at + together]) for at in range(0, len(rows) - together + 1, together)
    ]


def calibrated(honest: Iterable[dict[str, Evidence]]) -> Calibration:
    found, known = list(honest), Calibration()
    for name in (ACTIVATIONS.name, SAMPLING.name):
        known.add(Pair(name, "model", "prover", "verifier"), [claim[name] for claim in found])
    return known


def refused(known: Calibration, claims: Iterable[dict[str, Evidence]]) -> list[bool]:
    return [
        not all(
            known.judge(Pair(name, "model", "prover", "verifier"), one, RATE).accepted
            for name, one in claim.items()
        )
        for claim in claims
    ]


def rate(found: Sequence[bool]) -> dict[str, Any]:
    return {
        "rate": sum(found) / len(found),
        "of": len(found),
        "interval": rate_interval(sum(found), len(found)),
    }


def detection(kept: dict[str, Rows], together: int) -> dict[str, dict[str, Any]]:
    """Rates of refusal by pair and way, of those ways that were measured."""
    table: dict[str, dict[str, Any]] = {}
    for prover, verifier in PAIRS:
        honest = claims_of(kept.get(f"{prover} {verifier} {HONEST}", []), together)
        half = len(honest) // 2
        if half < FEWEST:
            continue
        row = table[f"{prover} -> {verifier}"] = {}
        crossed = refused(calibrated(honest[half:]), honest[:half]) + refused(
            calibrated(honest[:half]), honest[half:]
        )
        row[HONEST] = rate(crossed)
        known = calibrated(honest)
        for way in (*VARIANTS, *CHEATS):
            if claims := claims_of(kept.get(f"{prover} {verifier} {way}", []), together):
                row[way] = rate(refused(known, claims))
        if (prover, verifier) == ("fp32", "fp32") and (
            claims := claims_of(kept.get(f"bf16 fp32 {HONEST}", []), together)
        ):
            row[DECLARED] = rate(refused(known, claims))
    return table


def alarms(
    kept: dict[str, Rows], tokens_alone: bool = False, seed: int = 0
) -> dict[str, dict[str, Any]]:
    """By pair: the share of honest peers with an alarm, in how many claims, and the median number
    of claims until one by way.

    ``tokens_alone``: without the activations.
    """
    source, table = np.random.default_rng(seed), {}

    def read(key: str) -> sequential.Rows:
        found = np.array(kept.get(key, []), dtype=np.float64).reshape(-1, len(sequential.GRAINS))
        if tokens_alone:
            found[:, sequential.PARTS[0]] = 0.0  # so that every p-value is 1
        return found

    for prover, verifier in PAIRS:
        pool = read(f"{prover} {verifier} {HONEST}")
        half = len(pool) // 2
        if half < FEWEST:
            continue
        across, life = prover != verifier, min(half, LIFE)

        def lives(
            own: sequential.Rows | None,
            pool: sequential.Rows = pool,
            half: int = half,
            life: int = life,
        ) -> Any:
            for _ in range(PEERS):
                order = source.permutation(len(pool))
                claims = (
                    pool[order[half : half + life]]
                    if own is None
                    else own[source.integers(len(own), size=LIFE)]
                )
                yield pool[order[:half]], claims

        tops = sequential.log_odds(list(lives(None)), across).max(axis=0)
        row: dict[str, Any] = {
            "calibrated": half,
            "honest_claims": life,
            HONEST: float((tops >= ALARM).mean()),
        }
        table[f"{prover} -> {verifier}"] = row
        named = {way: f"{prover} {verifier} {way}" for way in (*VARIANTS, *CHEATS)}
        if (prover, verifier) == ("fp32", "fp32"):
            named[DECLARED] = f"bf16 fp32 {HONEST}"
        for way, key in named.items():
            if len(own := read(key)):
                odds = sequential.log_odds(list(lives(own)), across)
                row[way] = (
                    float((odds.max(axis=0) >= ALARM).mean()) if way in VARIANTS else _median(odds)
                )
    return table


def _median(odds: sequential.Rows) -> float | None:
    found = sorted(sequential.first_alarms(odds))
    return found[len(found) // 2] if np.isfinite(found[len(found) // 2]) else None


def costs(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Medians in the processor's seconds, of so many claims; and reading over writing, by dtype."""
    found = {work: statistics.median(times) for work, times in seconds.items()}
    for side in SIDES:
        write, read = (
            next((t for work, t in found.items() if work.startswith(f"{what} {side} 32 ")), None)
            for what in ("write", "read")
        )
        if write and read:
            found[f"read / write, {side}"] = read / write
    return found


def result(kept: dict[str, Any]) -> dict[str, Any]:
    """All figures as one object."""
    rows = kept["rows"]
    counts = {
        f"{prover}": {
            way: len(rows.get(f"{prover} {prover} {way}", []))
            for way in (HONEST, *CHEATS, *VARIANTS)
        }
        for prover in SIDES
    }
    return {
        "about": kept["about"],
        "claims": counts,
        "bytes_per_token": ACTIVATIONS.proof_bytes(TOKENS, 576) / TOKENS,
        "changes": kept["changes"],
        "seconds": costs(kept["seconds"]),
        "refused": detection(rows, 1),
        f"refused_of_{TOGETHER}_together": detection(rows, TOGETHER),
        "alarms": alarms(rows),
        "alarms_by_tokens_alone": alarms(rows, tokens_alone=True),
    }


def markdown(shown: dict[str, Any]) -> str:
    """The three tables."""
    parts = []
    for title, key in (
        (
            f"Refused of single claims of {TOKENS} tokens, in % (95 % interval) of so many:",
            "refused",
        ),
        (f"Refused where {TOGETHER} of them are one claim:", f"refused_of_{TOGETHER}_together"),
    ):
        table = shown[key]
        ways = [
            way
            for way in (HONEST, *VARIANTS, *CHEATS, DECLARED)
            if any(way in row for row in table.values())
        ]
        lines = [_line(["", *table]), _line(["---"] * (1 + len(table)))]
        lines += [_line([way, *(_cell(row.get(way)) for row in table.values())]) for way in ways]
        parts.append(title + "\n\n" + "\n".join(lines))
    parts += [
        _alarms(shown["alarms"], "Claims"),
        _alarms(shown["alarms_by_tokens_alone"], "By the tokens alone, claims"),
    ]
    return "\n\n".join(parts) + "\n"


def _alarms(table: dict[str, dict[str, Any]], what: str) -> str:
    ways = [way for way in (*CHEATS, DECLARED) if any(way in row for row in table.values())]
    lines = [_line(["", *table]), _line(["---"] * (1 + len(table)))]
    told = [
        f"{100 * row[HONEST]:g} % in {row['honest_claims']} ({row['calibrated']} calibrated)"
        for row in table.values()
    ]
    lines.append(_line(["honest: peers with an alarm", *told]))
    for way in VARIANTS:
        if any(way in row for row in table.values()):
            lines.append(
                _line(
                    [
                        f"{way}: peers with an alarm in {LIFE}",
                        *(_share(row.get(way)) for row in table.values()),
                    ]
                )
            )
    lines += [_line([way, *(_claims(row, way) for row in table.values())]) for way in ways]
    return f"{what} of {TOKENS} tokens until the alarm (median of {PEERS} peers):\n\n" + "\n".join(
        lines
    )


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    low, high = found["interval"]
    return f"{100 * found['rate']:.3g} ({100 * low:.2g} to {100 * high:.3g}) of {found['of']}"


def _share(found: float | None) -> str:
    return "" if found is None else f"{100 * found:g} %"


def _claims(row: dict[str, Any], way: str) -> str:
    if way not in row:
        return ""
    return "not found" if row[way] is None else f"{row[way]:g}"
