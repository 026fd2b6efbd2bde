"""What was aimed at before the runs were made, and what the rows of bench/table.py say to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from bench._quality_table import markdown_table, percent
from bench._table.methods import BEST, DEFAULT, FOUR_BITS, SPREAD, TUNED_EVERY, TUNED_PEERS

Row = dict[str, Any]
LINK, UTILISATION, FEW, FEWER, POINTS = "100/50", 0.97, 400, 1000, 2.0
NOT_RUN = "not run"


class Verdict(NamedTuple):
    """One aim. ``met`` is None where rows are missing. Numbers are compared as they are printed."""

    aim: str
    found: str
    met: bool | None = None


def _row(found: Sequence[Row], method: str, codec: str, peers: int = TUNED_PEERS, every: int = TUNED_EVERY) -> Row | None:
    wanted = {"method": method, "inner": "muon", "codec": codec, "peers": peers, "every": every}
    fits = (row for row in found if row["over_ddp_adamw"] is not None and all(row[name] == wanted[name] for name in wanted))
    return next(fits, None)


def _points(part: float) -> float:
    return round(100 * part, 1)


def _seeds(*rows: Row) -> str:
    few = min(row["seeds"] for row in rows)
    return "one seed" if few == 1 else f"{few} seeds"


def _over(row: Row, inner: str = "adamw") -> str:
    return percent(row[f"over_ddp_{inner}"], row[f"over_ddp_{inner}_sd"])


def _four_bits(found: Sequence[Row]) -> Iterator[Verdict]:
    name, row = f"DiLoCo with Muon, 4 bits, every {TUNED_EVERY}", _row(found, "diloco", FOUR_BITS)
    ratio = None if row is None else row["bytes_ratio"]
    if row is None or ratio is None:
        yield Verdict(f"{name}: not above DDP-AdamW, at {FEW} times fewer bytes", NOT_RUN)
    else:
        met = _points(row["over_ddp_adamw"]) <= 0 and round(ratio) >= FEW
        said = f"{_over(row)}, {ratio:,.0f} times fewer ({_seeds(row)})"
        yield Verdict(f"{name}: not above DDP-AdamW, at {FEW} times fewer bytes", said, met)
    if row is None or row["over_ddp_muon"] is None:
        yield Verdict(f"{name}: at most 2.5 % above DDP-Muon", NOT_RUN)
    else:
        yield Verdict(
            f"{name}: at most 2.5 % above DDP-Muon", f"{_over(row, 'muon')} ({_seeds(row)})", _points(row["over_ddp_muon"]) <= 2.5
        )


def _few_bytes(found: Sequence[Row]) -> Iterator[Verdict]:
    aim = f"{FEWER:,} times fewer bytes or more: at most 1 % above DDP-AdamW"
    able = [row for row in found if row["over_ddp_adamw"] is not None and round(row["bytes_ratio"] or 0) >= FEWER]
    if not able:
        yield Verdict(aim, NOT_RUN)
        return
    best = min(able, key=lambda row: (-row["seeds"], row["over_ddp_adamw"]))  # the best of one seed would be the luckiest
    name = f"{best['method']}, {'Muon' if best['inner'] == 'muon' else 'AdamW'}, {best['codec']}, every {best['every']}"
    said = f"{_over(best)}, {best['bytes_ratio']:,.0f} times fewer: {name}, {best['peers']} peers ({_seeds(best)})"
    yield Verdict(aim, said, _points(best["over_ddp_adamw"]) <= 1)


def _default_row(found: Sequence[Row], peers: int = TUNED_PEERS) -> Row | None:
    return _row(found, DEFAULT.method, DEFAULT.codec, peers, DEFAULT.every)


def _default(found: Sequence[Row]) -> Iterator[Verdict]:
    aim = f"The default (NoLoCo, overlapped) with Muon: at most 2 % above DDP-AdamW, utilisation {UTILISATION} or more on {LINK}"
    row = _default_row(found)
    if row is None:
        yield Verdict(aim, NOT_RUN)
        return
    used = row["utilisation"][LINK]
    met = _points(row["over_ddp_adamw"]) <= 2 and round(used, 2) >= UTILISATION
    yield Verdict(aim, f"{_over(row)}, {used:.2f}, {row['codec']}, every {row['every']} ({_seeds(row)})", met)


def _more_peers(found: Sequence[Row]) -> Iterator[Verdict]:
    pairs = [(name, _row(found, name, BEST[name]), _row(found, name, BEST[name], 2 * TUNED_PEERS)) for name in SPREAD]
    pairs.append(("the default", _default_row(found), _default_row(found, 2 * TUNED_PEERS)))
    both_known = [(name, few, many) for name, few, many in pairs if few is not None and many is not None]
    grown = {name: _points(many["over_ddp_adamw"] - few["over_ddp_adamw"]) for name, few, many in both_known}
    rows = [row for _, *both in both_known for row in both]
    said = ", ".join(f"{name} {points:+.1f}" for name, points in grown.items())
    yield Verdict(
        f"{2 * TUNED_PEERS} peers against {TUNED_PEERS}, with Muon: the gap grows by at most {POINTS:g} points",
        f"{said} ({_seeds(*rows)})" if grown else NOT_RUN,
        max(grown.values()) <= POINTS if grown else None,
    )


def verdicts(found: Sequence[Row]) -> list[Verdict]:
    """Of the rows of one model and length."""
    return [verdict for part in (_four_bits, _few_bytes, _default, _more_peers) for verdict in part(found)]


def markdown(found: Sequence[Row]) -> str:
    """The aims as a table."""
    words = {True: "yes", False: "no", None: ""}
    return markdown_table(("aim", "found", "met"), [(line.aim, line.found, words[line.met]) for line in verdicts(found)])
