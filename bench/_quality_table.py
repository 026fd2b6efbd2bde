"""Results of bench/quality.py as rows, as a table for people, and as the section of docs/benchmarks.md."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from rich.table import Table

Row = dict[str, Any]
CELL = ("method", "codec", "peers", "every", "steps", "batch")


def _validation(runs: Sequence[Row]) -> float:
    return statistics.fmean(run["validation"] if run["validation"] is not None else float("inf") for run in runs)


def _row(cell: tuple[Any, ...], runs: Sequence[Row]) -> Row:
    good = [run for run in runs if run["loss"] is not None]
    losses = [run["loss"] for run in good]
    row: Row = dict(zip(CELL, cell, strict=True))
    row.update(lr=runs[0]["lr"], outer=runs[0]["outer"])
    row["loss"] = statistics.fmean(losses) if losses else None
    row["loss_sd"] = statistics.stdev(losses) if len(losses) > 1 else None
    row["loss_averaged"] = statistics.fmean(run["loss_averaged"] for run in good) if good else None
    row.update(seeds=len(losses), diverged=len(runs) - len(losses))
    row["bytes_per_token"] = good[0]["bytes_per_token"] if good else None
    return row


def rows(results: Sequence[Row]) -> list[Row]:
    """One row for each (method, codec, peers, every, steps): the setting that was chosen, over its seeds.

    That is the one with the most seeds; where only the first seed was run, the one that is best on the validation half.
    """
    cells: dict[tuple[Any, ...], dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for run in results:
        cells[tuple(run[name] for name in CELL)][repr((run["lr"], sorted(run["outer"].items())))].append(run)
    found = []
    for cell, settings in cells.items():
        found.append(_row(cell, min(settings.values(), key=lambda runs: (-len(runs), _validation(runs)))))
    reference = {(row["steps"], row["batch"], row["peers"]): row["loss"] for row in found if row["method"] == "ddp"}
    anywhere = {key[:2]: loss for key, loss in reference.items()}
    for row in found:
        # Data parallel is the same mathematics for any number of peers, as long as the batch of all together is the same.
        ddp = reference.get((row["steps"], row["batch"], row["peers"]), anywhere.get((row["steps"], row["batch"])))
        row["above_ddp"] = None if ddp is None or row["loss"] is None else row["loss"] / ddp - 1
    found.sort(key=lambda row: (row["steps"], row["peers"], row["loss"] if row["loss"] is not None else float("inf")))
    return found


def _cells(row: Row) -> list[str]:
    loss = "diverged" if row["loss"] is None else f"{row['loss']:.3f}"
    if row["loss_sd"] is not None:
        loss += f" ± {row['loss_sd']:.3f}"
    averaged = row["loss_averaged"]
    return [
        row["method"],
        row["codec"],
        str(row["every"]),
        f"{row['lr']:g}",
        ", ".join(f"{name} {value:g}" for name, value in row["outer"].items()),
        loss,
        "" if averaged is None or averaged == row["loss"] else f"{averaged:.3f}",
        "" if row["above_ddp"] is None else f"{100 * row['above_ddp']:+.1f} %",
        "" if row["bytes_per_token"] is None else f"{row['bytes_per_token']:.4g}",
        str(row["seeds"]) + (f" ({row['diverged']} diverged)" if row["diverged"] else ""),
    ]


HEADS = ("method", "codec", "every", "lr", "outer", "held-out loss", "averaged", "against ddp", "bytes/token", "seeds")


def tables(found: Sequence[Row]) -> list[Table]:
    """For people: one for each number of peers and steps."""
    made = []
    for peers, steps in sorted({(row["peers"], row["steps"]) for row in found}, key=lambda pair: (pair[1], pair[0])):
        table = Table(*HEADS, title=f"{peers} peers, {steps} steps")
        for row in found:
            if (row["peers"], row["steps"]) == (peers, steps):
                table.add_row(*_cells(row))
        made.append(table)
    return made


def _markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in (heads, ["---"] * len(heads), *lines)) + "\n"


def _two_budgets(found: Sequence[Row]) -> str:
    """The distance to DDP of whatever was run with several numbers of steps."""
    by: dict[tuple[Any, ...], dict[int, float]] = defaultdict(dict)
    for row in found:
        if row["above_ddp"] is not None and row["method"] != "ddp":
            by[row["method"], row["codec"], row["peers"], row["every"]][row["steps"]] = row["above_ddp"]
    several = {key: gaps for key, gaps in by.items() if len(gaps) > 1}
    budgets = sorted({steps for gaps in several.values() for steps in gaps})
    if not several:
        return ""
    lines = [
        [*map(str, key), *(f"{100 * gaps[steps]:+.1f} %" if steps in gaps else "" for steps in budgets)]
        for key, gaps in sorted(several.items(), key=lambda item: min(item[1].values()))
    ]
    return "Above DDP by the number of steps:\n\n" + _markdown(
        ["method", "codec", "peers", "every", *(f"{steps} steps" for steps in budgets)], lines
    )


def markdown(found: Sequence[Row]) -> str:
    """The tables for docs/benchmarks.md."""
    parts = []
    for peers, steps in sorted({(row["peers"], row["steps"]) for row in found}, key=lambda pair: (-pair[1], pair[0] != 4, pair[0])):
        lines = [_cells(row) for row in found if (row["peers"], row["steps"]) == (peers, steps)]
        parts.append(f"{peers} peer{'s' * (peers > 1)}, {steps} steps:\n\n" + _markdown(HEADS, lines))
    parts.insert(1, _two_budgets(found))
    return "\n".join(filter(None, parts))
