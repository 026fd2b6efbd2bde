"""What it costs in held-out loss that a method over everyone averages in buckets, drawn anew every
few rounds.

    python bench/buckets.py --resume bench/results/buckets.jsonl --into docs/benchmarks.md

The model and the text are those of bench/quality.py, the peers live in one process
(``optim.Simulation``), and each has its shard and the same batch in every row. A row is a method, a
size of bucket and the rounds after which the buckets are drawn anew (0: never). "loss": nats per
byte on the reported half of the held-out text, of each peer's slow weights, the mean over peers;
"averaged": of the mean of these weights. "over" compares with a mean over everyone, seed by seed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench._page import put_into
from bench._quality_train import Spec, _mean, outer, task_of

BEGIN, END = "<!-- buckets: begin -->\n", "<!-- buckets: end -->"
NEVER = 1 << 30
OUTER = (("lr", 0.7), ("momentum", 0.6))
CASES = ((8, 1), (4, 1), (4, 4), (4, 0), (2, 4))
"""Size of a bucket, and rounds after which they are drawn anew; 0: never."""
ROW = ("method", "size", "redrawn", "seed", "peers", "every", "steps")


def run(
    method: str, size: int, redrawn: int, seed: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Train as one row says, and return it."""
    torch.set_num_threads(1)
    spec = Spec(
        method,
        "float32",
        options.peers,
        options.every,
        options.steps,
        options.batch,
        options.lr,
        OUTER,
        seed,
    )
    models, _, _ = outer(spec, size, redrawn or NEVER)
    task = task_of(1)
    loss = statistics.fmean(task.losses(model)["loss"] for model in models)
    row = dict(
        zip(
            ROW,
            (method, size, redrawn, seed, options.peers, options.every, options.steps),
            strict=True,
        )
    )
    return {**row, "loss": loss, "averaged": task.losses(_mean(models))["loss"]}


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table: means over seeds, and the standard error of the difference from a mean over
    everyone.
    """
    lines = [
        "| method | in a bucket | drawn anew after | loss | over a mean of all | loss of the "
        "averaged weights | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    everyone = {
        (row["method"], row["seed"]): row["loss"] for row in rows if row["size"] == row["peers"]
    }
    for method, size, redrawn in dict.fromkeys(
        (row["method"], row["size"], row["redrawn"]) for row in rows
    ):
        mine = [
            row
            for row in rows
            if (row["method"], row["size"], row["redrawn"]) == (method, size, redrawn)
        ]
        over = [
            100 * (row["loss"] / everyone[method, row["seed"]] - 1)
            for row in mine
            if (method, row["seed"]) in everyone
        ]
        error = f" ± {statistics.stdev(over) / len(over) ** 0.5:.2f}" if len(over) > 1 else ""
        loss, averaged = (
            statistics.fmean(row[key] for row in mine) for key in ("loss", "averaged")
        )
        all_of_them = size == mine[0]["peers"]
        said = (
            ""
            if all_of_them
            else f"{statistics.fmean(over):+.2f}{error} %"
            if over
            else "not known"
        )
        when = (
            ""
            if all_of_them
            else "each round"
            if redrawn == 1
            else f"{redrawn} rounds"
            if redrawn
            else "never"
        )
        lines.append(
            f"| `{method}` | {size} of {mine[0]['peers']} | {when} | {loss:.4f} | {said} | "
            f"{averaged:.4f} | {len(mine)} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rows that are not there yet. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", default=["diloco"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--every", type=int, default=25)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument(
        "--batch", type=int, default=64, help="windows of a step, of all peers together"
    )
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FILE",
        help="a line for each run; those that are there are not run again",
    )
    parser.add_argument(
        "--into",
        type=Path,
        metavar="PAGE",
        help="a page with the lines <!-- buckets: begin --> and end",
    )
    options = parser.parse_args(arguments)
    there = (
        options.resume.read_text(encoding="utf-8").splitlines()
        if options.resume and options.resume.exists()
        else []
    )
    rows = list(map(json.loads, there))
    done = {tuple(row[name] for name in ROW) for row in rows}
    for seed in options.seeds:
        for method, (size, redrawn) in (
            (method, case) for method in options.methods for case in CASES
        ):
            key = (method, size, redrawn, seed, options.peers, options.every, options.steps)
            if size > options.peers or key in done:
                continue
            rows.append(run(method, size, redrawn, seed, options))
            if options.resume is not None:
                with options.resume.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    table = markdown(rows)
    print(table)
    if options.into is not None:
        put_into(options.into, f"{table}\n", BEGIN, END)
    return 0


if __name__ == "__main__":
    sys.exit(main())
