"""What was aimed at before the runs were made, and what the rows of bench/table.py say to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from bench._quality_table import markdown_table, percent
from bench._table.methods import DEFAULT, ONE_BIT, TUNED_PEERS

Row = dict[str, Any]
LINK, UTILISATION = "100/50", 0.97
FEW, FEWER, AS_BEFORE = 400, 1000, 197
"""Times fewer bytes than data parallel training's. They were chosen when a payload was counted
once, however many peers it goes to; so counted the last is the default's in 8 bits every 50.
"""
FLOOR_POINTS, WEAK_POINTS = 2.0, 1.0
WIDE = {"mini": "mini-128"}
"""The same model with batches of twice the windows: each of twice as many peers keeps its batch."""
NOT_RUN = "not run"


class Verdict(NamedTuple):
    """One aim. ``met`` is None where rows are missing. Numbers are compared as they are printed."""

    aim: str
    found: str
    met: bool | None = None


def _points(part: float) -> float:
    return round(100 * part, 1)


def _seeds(*rows: Row) -> str:
    few = min(row["seeds"] for row in rows)
    return "one seed" if few == 1 else f"{few} seeds"


def _fewer(row: Row) -> int:
    return round(row["times_fewer"] or 0)


def _best(
    aim: str, most: float, rows: Sequence[Row], also: Callable[[Row], bool] = lambda _: True
) -> Verdict:
    """Judge the row with the most seeds, then the lowest loss: the best of one seed would be the
    luckiest.
    """
    if not rows:
        return Verdict(aim, NOT_RUN)
    best = min(rows, key=lambda row: (-row["seeds"], row["over_ddp_adamw"]))
    over = percent(best["over_ddp_adamw"], best["over_ddp_adamw_sd"])
    where = (
        f"{_fewer(best):,} times fewer, utilisation {best['utilisation'][LINK]:.2f}: "
        f"{best['method']}, {best['codec']}"
    )
    return Verdict(
        aim,
        f"{over}, {where}, every {best['every']} ({_seeds(best)})",
        _points(best["over_ddp_adamw"]) <= most and also(best),
    )


def _is_default(row: Row) -> bool:
    return (row["method"], row["inner"], row["codec"], row["every"]) == (
        DEFAULT.method,
        DEFAULT.inner,
        DEFAULT.codec,
        DEFAULT.every,
    )


def _four(found: Sequence[Row]) -> Iterator[Verdict]:
    """Aims for four peers, each about the best of some rows."""
    muon = [
        row
        for row in found
        if row["peers"] == TUNED_PEERS
        and row["inner"] == "muon"
        and row["over_ddp_adamw"] is not None
    ]
    one = [row for row in muon if row["codec"] == ONE_BIT and _fewer(row) >= FEW]

    def frugal_and_busy(row: Row) -> bool:
        return _fewer(row) >= AS_BEFORE and round(row["utilisation"][LINK], 2) >= UTILISATION

    text = (
        f"The default: at most 2 % above DDP-AdamW, {AS_BEFORE} times fewer bytes, utilisation "
        f"{UTILISATION} or more on {LINK}"
    )
    yield _best(text, 2, [row for row in muon if _is_default(row)], frugal_and_busy)
    text = f"DiLoCo, one bit, {FEW} times fewer bytes or more: not above DDP-AdamW"
    yield _best(text, 0, [row for row in one if row["method"] == "diloco"])
    text = f"{FEWER:,} times fewer bytes or more: at most 1.5 % above DDP-AdamW"
    yield _best(text, 1.5, [row for row in muon if _fewer(row) >= FEWER])
    text = f"Streaming, one bit, {FEW} times fewer bytes or more: at most 1.5 % above DDP-AdamW"
    yield _best(text, 1.5, [row for row in one if row["method"] == "streaming"])


def _floor(found: Sequence[Row]) -> Verdict:
    """Hold every row against an exact mean of the weights at every step of as many peers."""
    aim = (
        f"Every row within {FLOOR_POINTS:g} points of an exact mean at every step of as many peers"
    )
    muon = [row for row in found if row["inner"] == "muon" and row["over_ddp_adamw"] is not None]
    floors = {
        row["peers"]: row
        for row in muon
        if (row["method"], row["codec"], row["every"]) == ("local-sgd", "float32", 1)
    }
    above = {
        f"{row['method']}, {row['codec']}, every {row['every']}, {row['peers']} peers": _points(
            row["over_ddp_adamw"] - floors[row["peers"]]["over_ddp_adamw"]
        )
        for row in sorted(muon, key=lambda row: row["over_ddp_adamw"])
        if row["peers"] in floors and row["method"] not in ("ddp", "local-sgd")
    }
    if not above:
        return Verdict(aim, NOT_RUN)
    near, most = (
        sum(points <= FLOOR_POINTS for points in above.values()),
        max(above, key=lambda name: above[name]),
    )
    return Verdict(
        aim, f"{near} of {len(above)} rows; farthest {most}: {above[most]:+.1f}", near == len(above)
    )


def _weak(found: Sequence[Row], known: Sequence[Row]) -> Verdict:
    """Hold the default with twice the peers and twice the batch, in half of the steps, against
    itself.
    """
    aim = (
        f"The default, {2 * TUNED_PEERS} peers with the batches of {TUNED_PEERS}: its gap grows "
        f"by at most {WEAK_POINTS:g} point"
    )
    mine = next((row for row in found if _is_default(row) and row["peers"] == TUNED_PEERS), None)
    if mine is None:
        return Verdict(aim, NOT_RUN)
    wide = (
        row
        for row in known
        if _is_default(row)
        and row["model"] == WIDE.get(mine["model"])
        and row["text"] == mine["text"]
    )
    more = next(
        (
            row
            for row in wide
            if row["peers"] == 2 * TUNED_PEERS and 2 * row["steps"] == mine["steps"]
        ),
        None,
    )
    if more is None or more["over_ddp_adamw"] is None or mine["over_ddp_adamw"] is None:
        return Verdict(aim, NOT_RUN)
    grown = _points(more["over_ddp_adamw"] - mine["over_ddp_adamw"])
    return Verdict(aim, f"{grown:+.1f} points ({_seeds(mine, more)})", grown <= WEAK_POINTS)


def verdicts(found: Sequence[Row], known: Sequence[Row] = ()) -> list[Verdict]:
    """Of the rows of one model and length, and all ``known``, among which are those with larger
    batches.
    """
    return [*_four(found), _floor(found), _weak(found, known)]


def markdown(found: Sequence[Row], known: Sequence[Row] = ()) -> str:
    """The aims as a table."""
    words = {True: "yes", False: "no", None: ""}
    return markdown_table(
        ("aim", "found", "met"),
        [(line.aim, line.found, words[line.met]) for line in verdicts(found, known)],
    )
