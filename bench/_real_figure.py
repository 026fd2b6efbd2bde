"""The curves of bench/real.py as a picture: held-out loss by the tokens of all nodes, and by the
seconds of the run.

python bench/_real_figure.py bench/results/real.jsonl NAME docs/real.svg        # the rows whose
`name` begins with NAME
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run as a file, its own folder stands there

from bench._table.figure import FADED, INK, LARGE, SMALL, both_schemes

LOOKS = {
    "together": ("#2da44e", "#8250df", "#bf8700"),
    "alone": ("#d1495b",),
    "times": ("#d9822b",),
    "ddp": ("#2f81f7",),
}
"""A colour for each way of training: together, of each method."""
NAMES = {
    "together": "{nodes} nodes, {way}",
    "alone": "one alone",
    "times": "one alone, {times} times the steps",
    "ddp": "DDP of {nodes}",
}


def way(row: dict[str, Any]) -> str:
    """Return what is special about a run together, in words."""
    bit = any("codec=sign" in flag for flag in row["outer"])
    return str(row["method"]) + ", one bit" * bit + ", LoRA" * bool(row["lora"])


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the curves of all rows as SVG, in colours that the reader's scheme, light or dark,
    chooses.
    """
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "shoal"  # the same file from the same numbers
    matplotlib.rcParams["svg.fonttype"] = "none"  # letters as letters, not as outlines
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(8.4, 4.0), sharey=True)
    for axes, column, unit, label in zip(
        panels, (1, 2), (1000, 60), ("thousand tokens, all nodes", "minutes"), strict=True
    ):
        colours: dict[str, str] = {}
        for row in rows:
            for name, points in row["curves"].items():
                x, y = [point[column] / unit for point in points], [point[3] for point in points]
                shown = NAMES[name].format(**row, way=way(row))
                of_kind = [other for other in colours if other.split(",")[0] == shown.split(",")[0]]
                told = None if shown in colours else shown  # a line a seed
                colour = colours.setdefault(shown, LOOKS[name][len(of_kind) % len(LOOKS[name])])
                axes.plot(x, y, color=colour, linewidth=1.6, marker=".", markersize=4, label=told)
        axes.set_xlabel(label, fontsize=LARGE, color=INK)
        axes.tick_params(colors=INK, labelsize=SMALL)
        axes.grid(color=FADED, alpha=0.25, linewidth=0.6)
        for name, spine in axes.spines.items():
            spine.set_color(FADED)
            spine.set_visible(name in ("left", "bottom"))
    panels[0].set_ylabel("held-out loss, nats a token", fontsize=LARGE, color=INK)
    panels[0].legend(fontsize=SMALL, labelcolor=INK, frameon=False)
    figure.tight_layout()
    figure.savefig(path, transparent=True, metadata={"Date": None})
    pyplot.close(figure)
    path.write_text(both_schemes(path.read_text(encoding="utf-8")), encoding="utf-8")


def main() -> None:
    source, name, path = sys.argv[1:]
    rows = [json.loads(line) for line in Path(source).read_text(encoding="utf-8").splitlines()]
    draw([row for row in rows if row.get("name", "").startswith(name)], Path(path))


if __name__ == "__main__":
    main()
