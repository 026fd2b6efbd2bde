"""The figures of bench/verification.py as tables in Markdown, for reading and for
bench/results/tables.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from bench._verification_world import CHEATS

BEGIN, END = "<!-- verification: begin -->", "<!-- verification: end -->"


def into(page: str, tables: str) -> str:
    """``page`` with the tables between its marks. Raises ``ValueError`` if it has none."""
    head, begun, rest = page.partition(BEGIN)
    _, ended, tail = rest.partition(END)
    if not begun or not ended:
        raise ValueError(f"the page has no place for the tables: put {BEGIN} and {END} there")
    return f"{head}{BEGIN}\n{tables}{END}{tail}"


def markdown(result: dict[str, Any]) -> str:
    """All tables, a blank line between them."""
    parts = [_pooled(result), *(_pairs(result, heat) for heat in ("1", "0"))]
    parts.append(_votes(result["vote"]))
    return "\n\n".join(parts) + "\n"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def _percent(rate: float) -> str:
    return f"{100 * rate:.4g} %"


def _between(interval: list[float]) -> str:
    low, high = interval
    return f"{100 * low:.3g} to {100 * high:.3g} %"


def _pooled(result: dict[str, Any]) -> str:
    def rows() -> Iterator[list[str]]:
        vote = result["honest_vote"]
        yield [
            f"honest: {vote['of']} claims; {result['honest_claims']} checks by one verifier",
            f"{_percent(vote['rate'])} ({_between(vote['interval'])})",
            f"{_percent(result['honest_false_positive_rate'])} "
            f"({_between(result['honest_interval'])})",
        ]
        for name in CHEATS:
            yield [name] + [
                f"{_percent(result[kind][name])} ({_between(result[f'{kind}_interval'][name])})"
                for kind in ("detection", "detection_same_dtype")
            ]

    sizes = ", ".join(
        f"{name} {result[key]:.3g}"
        for name, key in (
            ("bytes a token", "proof_bytes_per_token"),
            ("proof", "proof_cost"),
            ("verifying", "verify_cost"),
        )
    )
    return (
        f"Refused, of {result['tokens']} tokens each; {result['detection_claims']} claims of each "
        "cheat, over all provers, at temperature 1 and greedy:\n\n"
        + _table(
            (
                "",
                "by the vote of three dtypes",
                "by one verifier of the same dtype (honest: bf16 with fp32 too)",
            ),
            rows(),
        )
        + f"\n\nCosts relative to generating: {sizes}."
    )


def _pairs(result: dict[str, Any], heat: str) -> str:
    pairs = {
        title.split(",")[0]: row
        for title, row in result["pairs"].items()
        if title.endswith(f"temperature {heat}")
    }
    rows = [
        [
            "honest",
            *(
                f"{100 * row['honest']['rate']:.3g} of {row['honest']['of']}"
                for row in pairs.values()
            ),
        ]
    ]
    rows += [
        [name, *(f"{100 * row['detection'][name]:.3g}" for row in pairs.values())]
        for name in CHEATS
    ]
    notes = sorted({row["warning"] for row in pairs.values()} - {""})
    return "\n\n".join(
        [
            f"Refused at temperature {heat}, prover -> verifier, in %:",
            _table(("", *pairs), rows),
            *notes,
        ]
    )


def _votes(rows: list[dict[str, float]]) -> str:
    shares = sorted({row["collude"] for row in rows})
    seats = sorted({int(row["n"]) for row in rows})
    cells = {
        (row["n"], row["collude"]): f"{100 * row['closed']:.3g} ({row['errors']:+.1f})"
        for row in rows
    }
    return (
        "Decided against the truth, in %, by closed form (standard errors to the simulation in "
        "brackets):\n\n"
        + _table(
            ("verifiers", *(f"{share:.0%} collude" for share in shares)),
            ([str(n), *(cells[n, share] for share in shares)] for n in seats),
        )
    )
