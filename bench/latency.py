"""What waiting costs a reduction over everybody against a pair, by simulation:
`python bench/latency.py --figure docs/latency.svg`.

The latency model of NoLoCo (arXiv 2506.10911, section 3 and figures 5A and 5B). Every message takes
a log-normal time with mean 1 and coefficient of variation cv, independent of all others. A tree
all-reduce of n peers reduces to the root and broadcasts back, and a parent waits for the slower of
its two children; a pair exchange waits for the slower of two messages, there and back. The first
table is the mean of the one over the mean of the other.

The second table leaves messages out and looks at waiting alone: every peer's inner step takes a
log-normal time (logarithm: mean 1, *variance* 0.5, which is what reproduces the paper's figure),
and after every m steps it waits either for everybody or for one random partner, whose own delays it
thus inherits. The table holds the time until the last peer is through, the one over the other.

Limits of the model: latency only, no bandwidth (a tree sends whole tensors at each hop, and where
bandwidth counts a ring is better); links are independent; no peer is slow for long; nobody dies.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

SPREADS = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5)  # coefficients of variation of figure 5A
STEPS = (10, 25, 50, 100)  # inner steps between two barriers of figure 5B
PEERS = (4, 16, 64, 256, 1024, 4096, 10_000)
ROUNDS = 250
STEP_VARIANCE = 0.5  # of the logarithm of one inner step's time
AT_ONCE = 1 << 22  # numbers held at once


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error."""

    value: float
    error: float

    def __truediv__(self, other: float) -> Estimate:
        return Estimate(self.value / other, self.error / other)


def estimate(samples: Tensor) -> Estimate:
    error = float(samples.std() / math.sqrt(len(samples))) if len(samples) > 1 else math.nan
    return Estimate(float(samples.mean()), error)


def sigma_of(cv: float) -> float:
    """The standard deviation of the logarithm, from the coefficient of variation: sigma^2 = ln(1 +
    cv^2).
    """
    return math.sqrt(math.log1p(cv * cv))


def mean_of_max(sigma: float, mu: float = 0.0) -> float:
    """E[max(a, b)] of two independent LogNormal(mu, sigma^2): (1 + erf(sigma / 2)) exp(mu + sigma^2
    / 2).
    """
    return (1 + math.erf(sigma / 2)) * math.exp(mu + sigma * sigma / 2)


def variance_of_max(sigma: float, mu: float = 0.0) -> float:
    """Var[max(a, b)], by E[max^2] = 2 exp(2 mu + 2 sigma^2) Phi(sqrt(2) sigma), where 2 Phi(sqrt(2)
    s) = 1 + erf(s).
    """
    second = math.exp(2 * mu + 2 * sigma * sigma) * (1 + math.erf(sigma))
    return second - mean_of_max(sigma, mu) ** 2


def tree_times(
    peers: int, samples: int, generator: torch.Generator, spreads: tuple[float, ...] = SPREADS
) -> Tensor:
    """Times of a reduction to the root of a binary tree with ``peers`` leaves, float64 [spreads,
    samples].

    All spreads are made of the same normal numbers, so that a row of the table is smooth. Where a
    level is odd, its last node goes up without a message. The broadcast back is the mirror image:
    the same distribution once more.
    """
    sigma = torch.tensor([sigma_of(cv) for cv in spreads], dtype=torch.float64)[:, None, None]
    chunk = max(AT_ONCE // (peers * len(spreads)), 1)
    found = []
    for start in range(0, samples, chunk):
        size = min(chunk, samples - start)
        times = torch.zeros(len(spreads), size, peers, dtype=torch.float64)
        while (width := times.shape[2]) > 1:
            even = width - width % 2
            normal = torch.randn(size, even, generator=generator, dtype=torch.float64)
            arrived = (
                times[:, :, :even] + (sigma * normal - sigma * sigma / 2).exp()
            )  # each message's mean is 1
            times = torch.cat(
                [arrived.view(*arrived.shape[:2], -1, 2).amax(3), times[:, :, even:]], dim=2
            )
        found.append(times[:, :, 0])
    return torch.cat(found, dim=1)


def tree_ratios(peers: int, samples: int, generator: torch.Generator) -> list[Estimate]:
    """Figure 5A: E[tree all-reduce] / E[pair exchange] for each of SPREADS.

    Both go there and back, so the factor 2 cancels.
    """
    times = tree_times(peers, samples, generator)
    sigmas = [sigma_of(cv) for cv in SPREADS]
    return [
        estimate(row) / mean_of_max(sigma, -sigma * sigma / 2)
        for sigma, row in zip(sigmas, times, strict=True)
    ]


def barrier_ratio(peers: int, generator: torch.Generator, rounds: int = ROUNDS) -> list[float]:
    """Figure 5B, one run: time with a barrier over all / time with barriers of random pairs, for
    each of STEPS.
    """
    everybody = [0.0 for _ in STEPS]
    clocks = torch.zeros(len(STEPS), peers, dtype=torch.float64)
    chunk = max(AT_ONCE // max(STEPS), 1)
    for _ in range(rounds):
        parts = []
        for start in range(0, peers, chunk):
            normal = torch.randn(min(chunk, peers - start), max(STEPS), generator=generator)
            parts.append(
                (1 + math.sqrt(STEP_VARIANCE) * normal).exp().cumsum(1, dtype=torch.float64)
            )
        spent = torch.cat(parts)
        order = torch.randperm(peers, generator=generator)
        first, second = order[: peers // 2], order[peers // 2 : peers // 2 * 2]
        for row, steps in enumerate(STEPS):
            took = spent[:, steps - 1]
            everybody[row] += float(took.max())
            clocks[row] += took
        later = torch.maximum(clocks[:, first], clocks[:, second])
        clocks[:, first] = later
        clocks[:, second] = later
    return [total / float(clock.max()) for total, clock in zip(everybody, clocks, strict=True)]


def barrier_ratios(
    peers: int, runs: int, generator: torch.Generator, rounds: int = ROUNDS
) -> list[Estimate]:
    """Figure 5B over ``runs`` independent runs."""
    values = torch.tensor(
        [barrier_ratio(peers, generator, rounds) for _ in range(runs)], dtype=torch.float64
    )
    return [estimate(column) for column in values.T]


def tables(
    sizes: Sequence[int], samples: int, runs: int, seed: int
) -> dict[str, list[dict[str, Any]]]:
    """Both tables; more than 1,024 peers get fewer samples, for the same work."""
    trees, barriers = [], []
    for peers in sizes:
        generator = torch.Generator().manual_seed(seed + peers)
        count = max(samples * 1024 // max(peers, 1024), 2)
        found = zip(SPREADS, tree_ratios(peers, count, generator), strict=True)
        cells = [{"cv": cv, "ratio": cell.value, "error": cell.error} for cv, cell in found]
        trees.append({"peers": peers, "samples": count, "cells": cells})
        count = max(runs * 1024 // max(peers, 1024), 2)
        means = zip(STEPS, barrier_ratios(peers, count, generator), strict=True)
        cells = [
            {"steps": steps, "ratio": cell.value, "error": cell.error} for steps, cell in means
        ]
        barriers.append({"peers": peers, "runs": count, "cells": cells})
    return {"tree": trees, "barrier": barriers}


def show(found: dict[str, list[dict[str, Any]]]) -> None:
    heads = {
        "tree": ("all-reduce by a tree / pair exchange", "cv"),
        "barrier": ("barrier over all / over pairs", "steps"),
    }
    for name, (title, column) in heads.items():
        rows = found[name]
        table = Table(
            "peers", *(f"{column} {cell[column]:g}" for cell in rows[0]["cells"]), title=title
        )
        for row in rows:
            table.add_row(
                f"{row['peers']:,}",
                *(f"{cell['ratio']:.4g} ± {cell['error']:.1g}" for cell in row["cells"]),
            )
        Console(stderr=True, width=132).print(table)


def draw(found: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Both tables as lines over the number of peers, in the format that the file's ending says."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "shoal"  # the same file from the same numbers
    matplotlib.rcParams["svg.fonttype"] = "none"  # letters as letters, not as outlines
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    labels = (
        (left, "tree", "cv", "cv of a message", "all-reduce / pair exchange"),
        (right, "barrier", "steps", "inner steps", "barrier over all / over pairs"),
    )
    for axes, name, column, legend, label in labels:
        rows = found[name]
        for network, cell in enumerate(rows[0]["cells"]):
            ratios = [row["cells"][network]["ratio"] for row in rows]
            axes.plot(
                [row["peers"] for row in rows],
                ratios,
                marker="o",
                markersize=3,
                label=f"{cell[column]:g}",
            )
        axes.set(xscale="log", xlabel="peers", ylabel=label)
        axes.legend(title=legend, fontsize="small")
        axes.grid(alpha=0.3)
        axes.minorticks_off()
    left.set(
        yscale="log", yticks=[1, 2, 5, 10, 20, 50], yticklabels=["1", "2", "5", "10", "20", "50"]
    )
    left.minorticks_off()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def arguments() -> argparse.Namespace:
    def count(text: str) -> int:
        if int(text) < 2:
            raise argparse.ArgumentTypeError("must be at least 2, or there is no standard error")
        return int(text)

    def sizes(text: str) -> list[int]:
        values = [int(part) for part in text.split(",")]
        if not all(2 <= value <= 100_000 for value in values):
            raise argparse.ArgumentTypeError("numbers of peers are from 2 to 100000")
        return values

    parser = argparse.ArgumentParser(description="Simulate NoLoCo's latency model.")
    parser.add_argument(
        "--peers", type=sizes, default=list(PEERS), help="numbers of peers, separated by commas"
    )
    parser.add_argument(
        "--samples",
        type=count,
        default=40_000,
        help="trees per number of peers (fewer above 1,024 peers)",
    )
    parser.add_argument(
        "--runs",
        type=count,
        default=20,
        help="runs of the barriers per number of peers (fewer above 1,024)",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--figure", type=Path, help="draw both tables into this file (needs matplotlib)"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    began = time.monotonic()
    found = tables(options.peers, options.samples, options.runs, options.seed)
    show(found)
    if options.figure is not None:
        try:
            draw(found, options.figure)
        except ModuleNotFoundError:
            print(
                "bench: matplotlib is not installed: pip install -e '.[bench]', or leave --figure "
                "out.",
                file=sys.stderr,
            )
            return 1
        except (OSError, ValueError) as error:
            print(
                f"bench: the figure could not be drawn ({error}): choose another --figure.",
                file=sys.stderr,
            )
            return 1
    if options.json:
        took = round(time.monotonic() - began, 1)
        print(json.dumps({**found, "seed": options.seed, "torch": torch.__version__, "took": took}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
