"""Results of bench/table.py as rows: losses against data parallel training, bytes against it, and
what each link makes of both.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from bench._quality_table import above, markdown_table, percent
from bench._table import aims, links
from shoal.swarm.exchange.cost import Work, per_param_step, times_fewer

Row = dict[str, Any]
CELL = ("text", "model", "method", "inner", "codec", "peers", "every", "steps")
RUN = ("text", "model", "steps")


def _validation(runs: Sequence[Row]) -> float:
    return statistics.fmean(
        run["validation"] if run["validation"] is not None else float("inf") for run in runs
    )


def _at_equal_time(
    row: Row, runs: Sequence[Row], what: Work
) -> tuple[dict[str, float], dict[str, float | None], dict[str, int]]:
    """Utilisation, loss at equal time and expected lag on each link."""
    used, loss, lags = {}, dict[str, float | None](), {}
    for link in links.LINKS:
        expected = links.on(link, what)
        steps = links.steps_in_time(row["steps"], row["peers"], min(1.0, expected.utilisation))
        found = [links.loss_at(run["curve"], steps) for run in runs]
        known = [value for value in found if value is not None]
        used[links.name(link)] = round(expected.utilisation, 6)
        loss[links.name(link)] = statistics.fmean(known) if len(known) == len(found) else None
        lags[links.name(link)] = expected.lag
    return used, loss, lags


def _row(cell: tuple[Any, ...], runs: Sequence[Row]) -> Row:
    good = [run for run in runs if run["loss"] is not None]
    row: Row = dict(zip(CELL, cell, strict=True))
    losses = {run["seed"]: run["loss"] for run in good}
    row.update(
        lr=runs[0]["lr"],
        outer=runs[0]["outer"],
        losses=losses,
        seeds=len(good),
        diverged=len(runs) - len(good),
    )
    row["loss"] = statistics.fmean(losses.values()) if losses else None
    row["loss_sd"] = statistics.stdev(losses.values()) if len(losses) > 1 else None
    row["params"], row["tokens"] = (
        good[0][name] if good else None for name in ("params", "tokens")
    )
    row["bytes_per_param_step"] = row["times_fewer"] = None
    row["utilisation"], row["loss_at_equal_time"], row["lag"] = {}, {}, {}
    if good:
        place = (row["method"], row["codec"], row["peers"], row["every"])
        back = good[0].get("back_per_param", 0.0)
        what = links.work(*place, good[0]["bytes_per_param"], back)
        row["bytes_per_param_step"] = per_param_step(what, links.PARAMETERS)
        row["times_fewer"] = times_fewer(what, links.PARAMETERS)
        row["utilisation"], row["loss_at_equal_time"], row["lag"] = _at_equal_time(row, good, what)
    return row


def chosen(runs: Sequence[Row]) -> list[Row]:
    """Of the runs of one cell those of one setting: the one with the most seeds, then the best on
    the validation half.
    """
    settings: dict[str, list[Row]] = defaultdict(list)
    for run in runs:
        settings[repr((run["lr"], sorted(run["outer"].items())))].append(run)
    return min(settings.values(), key=lambda found: (-len(found), _validation(found)))


def rows(results: Sequence[Row]) -> list[Row]:
    """One for each cell, the lowest loss first."""
    cells: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for run in results:
        cells[tuple(run[name] for name in CELL)].append(run)
    found = [_row(cell, chosen(runs)) for cell, runs in cells.items()]
    for row in found:
        for inner in ("adamw", "muon"):
            # Data parallel training is the same mathematics for any number of peers.
            ddp = parallel(found, row, inner)
            row[f"over_ddp_{inner}"], row[f"over_ddp_{inner}_sd"] = above(row, ddp) or (None, None)
    return sorted(
        found,
        key=lambda row: (row["steps"], row["loss"] if row["loss"] is not None else float("inf")),
    )


def parallel(found: Sequence[Row], row: Mapping[str, Any], inner: str) -> Row | None:
    """The row of data parallel training on the same text, model and number of steps."""
    same = [other for other in found if other["method"] == "ddp" and other["inner"] == inner]
    return next((other for other in same if all(other[name] == row[name] for name in RUN)), None)


def wanted(found: Sequence[Row], specs: Sequence[tuple[Any, ...]]) -> list[Row]:
    """The rows of these cells."""
    asked = set(specs)
    return [row for row in found if tuple(row[name] for name in CELL) in asked]


HEADS = (
    "method",
    "inner",
    "codec",
    "peers",
    "every",
    "held-out loss",
    "over DDP-AdamW",
    "over DDP-Muon",
    "fewer bytes",
    "bytes/parameter/step",
    "seeds",
)


def _name(row: Row) -> list[str]:
    return [
        row["method"],
        "Muon" if row["inner"] == "muon" else "AdamW",
        row["codec"],
        str(row["peers"]),
        str(row["every"]),
    ]


def cells(row: Row) -> list[str]:
    """A line of the table at equal tokens."""
    loss = "diverged" if row["loss"] is None else f"{row['loss']:.3f}"
    ratio, each = row["times_fewer"], row["bytes_per_param_step"]
    return [
        *_name(row),
        loss
        + (
            f" ± {row['loss_sd']:.3f}"
            if row["loss_sd"] is not None
            else " (one seed)"
            if row["seeds"] == 1
            else ""
        ),
        percent(row["over_ddp_adamw"], row["over_ddp_adamw_sd"]),
        percent(row["over_ddp_muon"], row["over_ddp_muon_sd"]),
        "" if ratio is None else f"{ratio:,.0f}",
        "" if each is None else f"{each:.4g}",
        str(row["seeds"]) + (f" ({row['diverged']} diverged)" if row["diverged"] else ""),
    ]


def _timed(row: Row) -> list[str]:
    line = _name(row)
    for link in links.LINKS:
        key = links.name(link)
        loss = row["loss_at_equal_time"].get(key)
        line.append(
            f"{'-' if loss is None else f'{loss:.2f}'} ({row['utilisation'][key]:.2f})"
            if row["utilisation"]
            else "-"
        )
    return line


def markdown(found: Sequence[Row], known: Sequence[Row] = ()) -> str:
    """The tables for bench/results/tables.md: for each model and length of run the aims, then all
    rows at equal tokens and time.

    ``known``: all rows, among them shorter runs with larger batches, which an aim is about.
    """
    parts = []
    for key in dict.fromkeys(tuple(row[name] for name in RUN) for row in found):
        mine = [row for row in found if tuple(row[name] for name in RUN) == key]
        text, model, steps = key
        params = next((row["params"] for row in mine if row["params"]), 0)
        about = f"model `{model}` ({params:,} parameters), {steps:,} steps, text `{text}`"
        if any(verdict.met is not None for verdict in aims.verdicts(mine, known)):
            parts.append(
                f"What was aimed at before the runs were made, {about}:\n\n"
                + aims.markdown(mine, known)
            )
        parts.append(
            f"All rows at equal tokens, the lowest loss first, {about}:\n\n"
            + markdown_table(HEADS, [*map(cells, mine)])
        )
        heads = (*HEADS[:5], *(f"{mbit} Mbit/s, {delay} ms" for mbit, delay in links.LINKS))
        computed = "both computed, from the curves of the runs and by the formulas of `shoal plan`"
        parts.append(
            f"The same rows at equal time, loss (utilisation), {computed}:\n\n"
            + markdown_table(heads, [*map(_timed, mine)])
        )
    return "\n".join(parts)
