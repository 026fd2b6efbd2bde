"""Detection against false alarms (ROC), one picture for each pair of dtypes, one line for each
cheat.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path

from bench._verification_claims import Scores
from bench._verification_world import CHEATS

COLOURS = (
    "#1b6ca8",
    "#c23b22",
    "#2e8b57",
    "#8e44ad",
    "#d68910",
    "#117a65",
    "#7b241c",
    "#5d6d7e",
    "#b03a8c",
    "#4a4a00",
)


def curve(honest: list[float], cheats: list[float]) -> tuple[list[float], list[float]]:
    """Rates of honest and of cheating claims above each threshold, from the strictest that an
    honest claim shows.
    """
    ranked, told = sorted(honest), sorted(cheats)
    rates = sorted(
        {round(len(ranked) ** (step / 40 - 1), 9) for step in range(41)}
    )  # from 1 / n to 1
    alarms, found = [], []
    for rate in rates:
        threshold = ranked[max(0, len(ranked) - max(1, round(rate * len(ranked))))]
        alarms.append(rate)
        found.append(1 - bisect_right(told, threshold) / len(told))
    return alarms, found


def draw(found: Mapping[tuple[str, float], Scores], path: Path) -> None:
    """What was found at temperature 1, into an image file of any kind that matplotlib writes."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "shoal"  # the same file from the same numbers
    matplotlib.rcParams["svg.fonttype"] = "none"  # letters as letters, not as outlines
    from matplotlib import pyplot

    warm = {prover: scores for (prover, temperature), scores in found.items() if temperature}
    many = len(warm)
    figure, grid = pyplot.subplots(
        many, many, figsize=(3.4 * many, 2.6 * many), sharex=True, sharey=True, squeeze=False
    )
    for row, (prover, scores) in zip(grid, warm.items(), strict=True):
        for axes, (verifier, honest) in zip(row, scores.honest.items(), strict=True):
            for colour, name in zip(COLOURS, CHEATS, strict=True):
                axes.plot(
                    *curve(honest, scores.cheats[name][verifier]),
                    color=colour,
                    linewidth=1.3,
                    label=name,
                )
            axes.set_title(f"prover {prover}, verifier {verifier}", fontsize=9)
            axes.set_xscale("log")
            axes.set_ylim(-0.03, 1.03)
            axes.grid(alpha=0.3)
    for axes in grid[-1]:
        axes.set_xlabel("honest claims refused", fontsize=8)
    for row in grid:
        row[0].set_ylabel("cheats refused", fontsize=8)
    lines, names = grid[0][0].get_legend_handles_labels()
    figure.legend(lines, names, loc="lower center", ncol=5, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
