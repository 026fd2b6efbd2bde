"""Bytes that leave a peer against the loss over data parallel training, as a picture, and the
numbers behind it.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench._table.methods import TUNED_PEERS
from shoal.optim.codecs.two_way import SEPARATOR

Row = dict[str, Any]
COLUMNS = (
    "model",
    "steps",
    "method",
    "inner",
    "codec",
    "peers",
    "every",
    "seeds",
    "loss",
    "loss_sd",
    "over_ddp_adamw",
    "over_ddp_muon",
    "bytes_per_param_step",
    "times_fewer",
)
INK, FADED = "#010203", "#010204"
"""Stand for the colours of the reader's scheme until the picture is written."""
FONTS = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif"


class Look(NamedTuple):
    """How a method is shown."""

    name: str
    colour: str
    """Legible on white and on black."""
    mark: str


LOOKS = {
    "ddp": Look("all-reduce (DDP)", INK, "s"),
    "torchft": Look("torchft DiLoCo", "#d1495b", "<"),
    "torchft-streaming": Look("torchft Streaming", "#d1495b", ">"),
    "local-sgd": Look("local SGD", "#8a8f98", "X"),
    "co2": Look("CO2", "#a8763e", "P"),
    "sparseloco": Look("SparseLoCo", "#d9822b", "v"),
    "streaming": Look("Streaming DiLoCo", "#8957e5", "D"),
    "streaming-mix": Look("Streaming, mix 0.5", "#8957e5", "d"),
    "diloco": Look("DiLoCo", "#2f81f7", "o"),
    "noloco": Look("NoLoCo, waiting", "#1b9aaa", "h"),
    "noloco-overlap": Look("NoLoCo, overlapped", "#2da44e", "^"),
}
INNER_NAMES = {"adamw": "AdamW", "muon": "Muon"}
CODEC_NAMES = {
    "float32": "32 bits",
    "int8": "8 bits",
    "e3m0": "4 bits",
    "auto:2": "2 bits",
    "sign": "1 bit",
}
HIGHEST = 15.0
"""Per cent over data parallel training with Muon. What is above stands at the edge, with its
number.
"""
SMALL, LARGE = 10, 11
"""Points of the letters, in a picture of 475 points: legible on a telephone."""
PLACES = (
    (0, -8, "center", "top"), (9, -3, "left", "top"), (-9, -3, "right", "top"),
    (0, 8, "center", "bottom"), (10, 0, "left", "center"), (9, 3, "left", "bottom"),
    (-10, 0, "right", "center"), (-9, 3, "right", "bottom"), (14, -14, "left", "top"),
    (-14, -14, "right", "top"), (0, -22, "center", "top"), (14, 14, "left", "bottom"),
)  # fmt: skip
"""Where a text may stand beside its point, in points: tried in this order."""
PARTS_OF_A_LINE = 16


class Text(NamedTuple):
    """A text for a point, and where it may stand."""

    x: float
    y: float
    text: str
    places: Sequence[tuple[int, int, str, str]] = PLACES


def numbers(found: Sequence[Row], path: Path) -> None:
    """The rows as CSV."""
    with path.open("w", encoding="utf-8", newline="") as file:
        out = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        out.writeheader()
        for row in found:
            out.writerow(
                {
                    name: f"{row[name]:.6g}" if isinstance(row[name], float) else row[name]
                    for name in COLUMNS
                }
            )


def points(found: Sequence[Row]) -> list[Row]:
    """What the picture can show: rows of ``TUNED_PEERS`` with a distance to data parallel training,
    that send anything.
    """
    known = [
        row for row in found if row["over_ddp_muon"] is not None and row["bytes_per_param_step"]
    ]
    return [row for row in known if row["peers"] == TUNED_PEERS]


def frontier(shown: Sequence[Row]) -> list[Row]:
    """The rows than which none has both fewer bytes and a lower loss, the fewest bytes first."""
    best: list[Row] = []
    for row in sorted(shown, key=lambda row: (row["bytes_per_param_step"], row["over_ddp_muon"])):
        if not best or row["over_ddp_muon"] < best[-1]["over_ddp_muon"]:
            best.append(row)
    return best


def label(row: Row) -> str:
    if row["method"] == "ddp":
        return INNER_NAMES[row["inner"]]
    names = []
    for codec in str(row["codec"]).split(SEPARATOR):
        base = codec.partition("+")[0]
        names.append(CODEC_NAMES.get(base, base))
    return f"{', back in '.join(names)}, every {row['every']}"


def place(
    axes: Any, texts: Sequence[Text], taken: Sequence[tuple[float, float]], line: Sequence[Any]
) -> None:
    """Write texts beside their points where no other text, no point and no line is; what has no
    room is left out.
    """
    renderer = axes.figure.canvas.get_renderer()
    corners = [axes.transData.transform(point) for point in line]
    on_line = [
        left + (right - left) * part / PARTS_OF_A_LINE
        for left, right in itertools.pairwise(corners)
        for part in range(1, PARTS_OF_A_LINE)
    ]
    marks = [*(axes.transData.transform(point) for point in taken), *on_line]
    boxes, inside, zero = (
        list[Any](),
        axes.get_window_extent(renderer),
        axes.transData.transform((1, 0))[1],
    )
    for x, y, text, places in texts:
        for dx, dy, across, up in places:
            made = axes.annotate(
                text,
                (x, y),
                (dx, dy),
                textcoords="offset points",
                ha=across,
                va=up,
                fontsize=SMALL,
                color=INK,
            )
            box = made.get_window_extent(renderer)
            wide = box.padded(3)
            free = (
                inside.x0 <= box.x0
                and box.x1 <= inside.x1
                and inside.y0 <= box.y0
                and box.y1 <= inside.y1
            )
            free &= not box.y0 < zero < box.y1
            if (
                free
                and not any(box.overlaps(other) for other in boxes)
                and not any(wide.contains(*mark) for mark in marks)
            ):
                boxes.append(box.padded(2))
                break
            made.remove()


def draw(found: Sequence[Row], path: Path) -> None:
    """As SVG, with lines and letters in a colour that the reader's scheme, light or dark,
    chooses.
    """
    import matplotlib
    import numpy

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "shoal"  # the same file from the same numbers
    matplotlib.rcParams["svg.fonttype"] = "none"  # letters as letters, not as outlines
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    shown = points(found)
    figure, axes = pyplot.subplots(figsize=(6.6, 5.8))
    at = [(row["bytes_per_param_step"], min(100 * row["over_ddp_muon"], HIGHEST)) for row in shown]
    for row, (x, y) in zip(shown, at, strict=True):
        look = LOOKS[row["method"]]
        axes.plot(
            x,
            y,
            look.mark,
            markersize=8,
            markeredgewidth=1.4,
            color=look.colour,
            alpha=1 if row["seeds"] > 1 else 0.5,
            markerfacecolor=look.colour if row["inner"] == "muon" else "none",
            clip_on=False,
            zorder=3,
        )
    best = frontier(shown)
    line = [point for point, row in zip(at, shown, strict=True) if row in best]
    line.sort()
    axes.plot(
        [x for x, _ in line],
        [y for _, y in line],
        linewidth=1,
        linestyle=(0, (2, 3)),
        color=FADED,
        zorder=1,
    )
    axes.axhline(0, linewidth=1.2, color=INK, zorder=2)
    axes.set_xscale("log")
    axes.invert_xaxis()
    low, high = axes.get_ylim()
    axes.set_ylim(low - 0.06 * (high - low), high + 0.04 * (high - low))
    axes.set_xlabel(
        "bytes that leave a peer, a parameter and inner step", fontsize=LARGE, color=INK
    )
    axes.set_ylabel("held-out loss over all-reduce with Muon", fontsize=LARGE, color=INK)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.yaxis.set_major_formatter(
        lambda value, _: f"{value:+g} %".replace("-", "\N{MINUS SIGN}") if value else "0 %"
    )
    most = max(
        (row["bytes_per_param_step"] * row["times_fewer"] for row in shown if row["times_fewer"]),
        default=None,
    )
    if most:
        top = axes.secondary_xaxis("top", functions=(lambda x: most / numpy.maximum(x, 1e-9),) * 2)
        top.set_xlabel("times fewer than all-reduce", fontsize=LARGE, color=INK)
        top.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        top.minorticks_off()
        top.tick_params(colors=INK, labelsize=SMALL)
        top.spines["top"].set_color(FADED)
    axes.minorticks_off()
    axes.tick_params(colors=INK, labelsize=SMALL)
    axes.grid(color=FADED, alpha=0.25, linewidth=0.6)
    for name, spine in axes.spines.items():
        spine.set_color(FADED)
        spine.set_visible(name in ("left", "bottom"))
    used = {row["method"] for row in shown}
    signs = [
        Line2D(
            [],
            [],
            linestyle="none",
            marker=look.mark,
            color=look.colour,
            markersize=8,
            label=look.name,
        )
        for name, look in LOOKS.items()
        if name in used
    ]
    figure.tight_layout(rect=(0, 0.2, 1, 1))
    figure.legend(
        handles=signs,
        fontsize=SMALL,
        labelcolor=INK,
        frameon=False,
        loc="lower center",
        ncols=3,
        bbox_to_anchor=(0.5, 0.045),
        columnspacing=1,
        handletextpad=0.2,
    )
    few = "; faint: one seed" if any(row["seeds"] == 1 for row in shown) else ""
    figure.text(
        0.5,
        0.02,
        f"filled: Muon inside; hollow: AdamW inside{few}",
        ha="center",
        fontsize=SMALL,
        color=INK,
    )
    ddp = [row for row in shown if row["method"] == "ddp"]
    best.sort(
        key=lambda row: abs(row["over_ddp_muon"])
    )  # those that compete with data parallel training come first
    named = [
        *ddp,
        *(row for row in best if row["method"] != "ddp" and 100 * row["over_ddp_muon"] < HIGHEST),
    ]
    texts = [
        Text(row["bytes_per_param_step"], 100 * row["over_ddp_muon"], label(row)) for row in named
    ]
    edge = [(row, point) for row, point in zip(shown, at, strict=True) if point[1] == HIGHEST]
    over = [Text(*point, f"{100 * row['over_ddp_muon']:+.0f} %") for row, point in edge]
    place(axes, texts + over, at, line)
    figure.savefig(path, transparent=True, metadata={"Date": None})
    pyplot.close(figure)
    path.write_text(both_schemes(path.read_text(encoding="utf-8")), encoding="utf-8")


def both_schemes(svg: str) -> str:
    """The picture in colours that are light where the reader's scheme is dark, with letters of the
    reader's machine.
    """
    for black in ("stroke: #000000", "fill: #000000", f"stroke: {INK}", f"fill: {INK}"):
        svg = svg.replace(black, f"{black.split(':')[0]}: currentColor")
    style = (
        "<style>svg { color: #1f2328 } @media (prefers-color-scheme: dark) { svg { color: #e6edf3 "
        "} } text { fill: currentColor }</style>\n"
    )
    svg = svg.replace(FADED, "#7d8590").replace(
        "'DejaVu Sans', 'Bitstream Vera Sans'", f"{FONTS}, 'Bitstream Vera Sans'"
    )
    head, tail = svg.split(" <defs>", 1)
    return f"{head} {style} <defs>{tail}"


def write(found: Sequence[Row], path: Path) -> None:
    """The picture, and its numbers beside it."""
    numbers(found, path.with_suffix(".csv"))
    draw(found, path)
