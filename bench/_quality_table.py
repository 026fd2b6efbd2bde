"""Results of bench/quality.py as rows, as a table for people, and as the section of
bench/results/tables.md.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from bench._quality_methods import METHODS
from shoal.swarm.exchange.cost import ALL_REDUCED, FLOAT32, Costs, Work, per_param_step

Row = dict[str, Any]
PARAMETERS = 135_808
"""Of the model that all rows train."""
CELL = ("method", "codec", "peers", "every", "steps", "batch")


def _validation(runs: Sequence[Row]) -> float:
    return statistics.fmean(
        run["validation"] if run["validation"] is not None else float("inf") for run in runs
    )


def _bytes_per_param_step(row: Row, run: Row) -> float:
    """Bytes that leave a peer, of those that the run handed to the exchange."""
    recipe = METHODS[row["method"]]
    is_ddp = recipe.name is None
    nbytes = round(run["bytes_per_token"] * run["tokens"] / row["steps"] * row["every"])
    work = Work(
        recipe.group,  # type: ignore[arg-type]
        nbytes,
        nbytes // FLOAT32,
        row["peers"],
        row["every"],
        step_s=1.0,
        sums=row["codec"] == "float32",
        costs=Costs(all_reduced=2 if is_ddp else ALL_REDUCED),
    )
    return per_param_step(work, PARAMETERS)


def _row(cell: tuple[Any, ...], runs: Sequence[Row]) -> Row:
    good = [run for run in runs if run["loss"] is not None]
    losses = [run["loss"] for run in good]
    row: Row = dict(zip(CELL, cell, strict=True))
    row.update(lr=runs[0]["lr"], outer=runs[0]["outer"])
    row["loss"] = statistics.fmean(losses) if losses else None
    row["loss_sd"] = statistics.stdev(losses) if len(losses) > 1 else None
    row["loss_averaged"] = statistics.fmean(run["loss_averaged"] for run in good) if good else None
    row.update(
        seeds=len(losses),
        diverged=len(runs) - len(losses),
        losses={run["seed"]: run["loss"] for run in good},
    )
    row["bytes_per_param_step"] = _bytes_per_param_step(row, good[0]) if good else None
    return row


def above(row: Row, other: Row | None) -> tuple[float, float | None] | None:
    """How much higher the loss is than the other's: mean and standard deviation over the seeds that
    both have.
    """
    shared = sorted(set(row["losses"]) & set(other["losses"])) if other is not None else []
    if other is None or not shared:
        return None
    ratios = [row["losses"][seed] / other["losses"][seed] - 1 for seed in shared]
    return statistics.fmean(ratios), statistics.stdev(ratios) if len(ratios) > 1 else None


def rows(results: Sequence[Row]) -> list[Row]:
    """One row for each (method, codec, peers, every, steps): the setting that was chosen, over its
    seeds.

    That is the one with the most seeds; where only the first seed was run, the one that is best on
    the validation half.
    """
    cells: dict[tuple[Any, ...], dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for run in results:
        cells[tuple(run[name] for name in CELL)][
            repr((run["lr"], sorted(run["outer"].items())))
        ].append(run)
    found = []
    for cell, settings in cells.items():
        found.append(
            _row(cell, min(settings.values(), key=lambda runs: (-len(runs), _validation(runs))))
        )
    reference = {
        (row["steps"], row["batch"], row["peers"]): row for row in found if row["method"] == "ddp"
    }
    anywhere = {key[:2]: row for key, row in reference.items()}
    for row in found:
        # Data parallel is the same mathematics for any number of peers, as long as the batch of all
        # together is the same.
        ddp = reference.get(
            (row["steps"], row["batch"], row["peers"]), anywhere.get((row["steps"], row["batch"]))
        )
        row["above_ddp"], row["above_ddp_sd"] = above(row, ddp) or (None, None)
    found.sort(
        key=lambda row: (
            row["steps"],
            row["peers"],
            row["loss"] if row["loss"] is not None else float("inf"),
        )
    )
    return found


def percent(mean: float | None, sd: float | None) -> str:
    return (
        ""
        if mean is None
        else f"{100 * mean:+.1f}" + (f" ± {100 * sd:.1f}" if sd is not None else "") + " %"
    )


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
        percent(row["above_ddp"], row["above_ddp_sd"]) if row["method"] != "ddp" else "",
        "" if row["bytes_per_param_step"] is None else f"{row['bytes_per_param_step']:.4g}",
        str(row["seeds"]) + (f" ({row['diverged']} diverged)" if row["diverged"] else ""),
    ]


HEADS = (
    "method",
    "codec",
    "every",
    "lr",
    "outer",
    "held-out loss",
    "averaged",
    "against ddp",
    "bytes/parameter/step",
    "seeds",
)


def tables(found: Sequence[Row]) -> list[Table]:
    """For people: one for each number of peers and steps."""
    made = []
    for peers, steps in sorted(
        {(row["peers"], row["steps"]) for row in found}, key=lambda pair: (pair[1], pair[0])
    ):
        table = Table(*HEADS, title=f"{peers} peers, {steps} steps")
        for row in found:
            if (row["peers"], row["steps"]) == (peers, steps):
                table.add_row(*_cells(row))
        made.append(table)
    return made


def markdown_table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return (
        "\n".join("| " + " | ".join(line) + " |" for line in (heads, ["---"] * len(heads), *lines))
        + "\n"
    )


def _two_budgets(found: Sequence[Row]) -> str:
    """The distance to DDP of whatever was run with several numbers of steps."""
    by: dict[tuple[Any, ...], dict[int, Row]] = defaultdict(dict)
    for row in found:
        if row["above_ddp"] is not None and row["method"] != "ddp":
            by[row["method"], row["codec"], row["peers"], row["every"]][row["steps"]] = row
    several = {key: gaps for key, gaps in by.items() if len(gaps) > 1}
    if not several:
        return ""
    budgets = sorted({steps for gaps in several.values() for steps in gaps})
    lines = [
        [
            *map(str, key),
            *(
                percent(gaps[n]["above_ddp"], gaps[n]["above_ddp_sd"]) if n in gaps else ""
                for n in budgets
            ),
        ]
        for key, gaps in sorted(
            several.items(), key=lambda item: float(item[1][max(item[1])]["above_ddp"])
        )
    ]
    heads = ["method", "codec", "peers", "every", *(f"{steps} steps" for steps in budgets)]
    return "Above ddp, by the number of steps:\n\n" + markdown_table(heads, lines)


def _codecs(found: Sequence[Row]) -> str:
    """What each codec costs and saves next to the same exchange in float32; SparseLoCo's next to
    DiLoCo's.
    """
    plain = {
        (r["method"], r["peers"], r["every"], r["steps"]): r
        for r in found
        if r["codec"] == "float32"
    }
    lines = []
    for row in found:
        method = "diloco" if row["method"] == "sparseloco" else row["method"]
        other = plain.get((method, row["peers"], row["every"], row["steps"]))
        over = above(row, other) if row["codec"] != "float32" else None
        if over is not None and other is not None:
            fewer = f"{other['bytes_per_param_step'] / row['bytes_per_param_step']:.1f}"
            where = [str(row[name]) for name in ("peers", "every", "steps")]
            shared = len(set(row["losses"]) & set(other["losses"]))
            lines.append([row["method"], row["codec"], *where, percent(*over), fewer, str(shared)])
    if not lines:
        return ""
    heads = [
        "method",
        "codec",
        "peers",
        "every",
        "steps",
        "against float32",
        "times fewer bytes",
        "seeds",
    ]
    return "Codecs:\n\n" + markdown_table(heads, lines)


def _overlapped(found: Sequence[Row]) -> str:
    """Gossip that overlaps next to gossip that waits, and to data parallel training with the same
    inner optimizer.
    """
    plain = {
        (r["method"], r["peers"], r["every"], r["steps"]): r
        for r in found
        if r["codec"] == "float32"
    }
    lines = []
    for row in found:
        where = (row["peers"], row["every"], row["steps"])
        blocking = plain.get((row["method"].replace("-overlap", ""), *where))
        late = (
            above(row, blocking)
            if "-overlap" in row["method"] and row["codec"] == "float32"
            else None
        )
        if late is None or blocking is None:
            continue
        muon = row["method"].endswith("-muon")
        # Data parallel is the same mathematics for any number of peers.
        parallel = plain.get(("ddp-muon" if muon else "ddp", 4, 1, row["steps"]))
        over = above(row, parallel)
        shared = len(set(row["losses"]) & set(blocking["losses"]))
        losses = [
            f"{one['loss']:.3f}" + (f" ± {one['loss_sd']:.3f}" if one["loss_sd"] else "")
            for one in (blocking, row)
        ]
        key = (row["steps"], muon, *where)
        first = ["Muon" if muon else "AdamW", *map(str, where)]
        lines.append(
            (key, [*first, *losses, percent(*late), percent(*over) if over else "", str(shared)])
        )
    if not lines:
        return ""
    heads = [
        "inner",
        "peers",
        "every",
        "steps",
        "blocking",
        "overlapped",
        "against blocking",
        "against DDP, same inner",
        "seeds",
    ]
    title = "NoLoCo that overlaps (4 fragments, lag a fifth of every):\n\n"
    return title + markdown_table(heads, [line for _, line in sorted(lines)])


def markdown(found: Sequence[Row]) -> str:
    """The tables for bench/results/tables.md."""
    parts = []
    for peers, steps in sorted(
        {(row["peers"], row["steps"]) for row in found},
        key=lambda pair: (-pair[1], pair[0] != 4, pair[0]),
    ):
        lines = [_cells(row) for row in found if (row["peers"], row["steps"]) == (peers, steps)]
        parts.append(
            f"{peers} peer{'s' * (peers > 1)}, {steps} steps:\n\n" + markdown_table(HEADS, lines)
        )
    return "\n".join(
        filter(None, [_overlapped(found), _two_budgets(found), _codecs(found), *parts])
    )
