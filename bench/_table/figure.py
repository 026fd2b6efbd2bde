"""Bytes a token against the loss over data parallel training, as a picture, and the numbers behind it."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
COLUMNS = (
    "model", "steps", "method", "inner", "codec", "peers", "every", "seeds", "loss", "loss_sd", "over_ddp_adamw", "over_ddp_muon",
    "bytes_per_token", "bytes_ratio",
)  # fmt: skip
COLOURS = ("#1b6ca8", "#c23b22", "#2e8b57", "#8e44ad", "#d68910", "#117a65", "#7b241c", "#5d6d7e", "#b03a8c", "#808000", "#3f51b5")


def numbers(found: Sequence[Row], path: Path) -> None:
    """The rows as CSV."""
    with path.open("w", encoding="utf-8", newline="") as file:
        out = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        out.writeheader()
        for row in found:
            out.writerow({name: f"{row[name]:.6g}" if isinstance(row[name], float) else row[name] for name in COLUMNS})


def points(found: Sequence[Row]) -> list[Row]:
    """What the picture can show: rows with a distance to data parallel training, that send anything."""
    return [row for row in found if row["over_ddp_adamw"] is not None and row["bytes_per_token"]]


def draw(found: Sequence[Row], path: Path) -> None:
    """As SVG, with lines and letters in a colour that the reader's scheme, light or dark, chooses."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "shoal"  # the same file from the same numbers
    matplotlib.rcParams["svg.fonttype"] = "none"  # letters as letters, not as outlines
    from matplotlib import pyplot

    shown = points(found)
    names = list(dict.fromkeys(row["method"] for row in shown))
    figure, axes = pyplot.subplots(figsize=(8, 4.6))
    for number, name in enumerate(names):
        for inner, mark in (("adamw", "o"), ("muon", "D")):
            mine = [row for row in shown if (row["method"], row["inner"]) == (name, inner)]
            label = name if inner == "muon" or not any(row["inner"] == "muon" for row in shown if row["method"] == name) else None
            axes.scatter(
                [row["bytes_per_token"] for row in mine], [100 * row["over_ddp_adamw"] for row in mine], s=34, marker=mark,
                label=label if mine else None, color=COLOURS[number % len(COLOURS)],
                facecolors=COLOURS[number % len(COLOURS)] if inner == "muon" else "none",
            )  # fmt: skip
    axes.set_xscale("log")
    axes.invert_xaxis()
    axes.axhline(0, linewidth=0.8, color="#808080")
    axes.set_xlabel("bytes a token that a peer sends (fewer to the right)")
    axes.set_ylabel("held-out loss over DDP with AdamW, %")
    axes.set_title("Filled: Muon inside. Hollow: AdamW inside.", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    figure.savefig(path, transparent=True, metadata={"Date": None})
    pyplot.close(figure)
    path.write_text(both_schemes(path.read_text(encoding="utf-8")), encoding="utf-8")


def both_schemes(svg: str) -> str:
    """The picture with black as the colour of the text, which is light where the reader's scheme is dark."""
    for black in ("stroke: #000000", "fill: #000000"):
        svg = svg.replace(black, f"{black.split(':')[0]}: currentColor")
    style = (
        "<style>svg { color: #1f2328 } @media (prefers-color-scheme: dark) { svg { color: #e6edf3 } } "
        "text { fill: currentColor }</style>\n"
    )
    head, tail = svg.split(" <defs>", 1)
    return f"{head} {style} <defs>{tail}"


def write(found: Sequence[Row], path: Path) -> None:
    """The picture, and its numbers beside it."""
    numbers(found, path.with_suffix(".csv"))
    draw(found, path)
