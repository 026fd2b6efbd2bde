"""Held-out loss, bytes and utilisation of all methods in one table: `python bench/table.py`.

    # some rows of a small model, minutes
    python bench/table.py --small --seeds 1 --json
    python bench/table.py --data FOLDER --resume bench/results/table.jsonl --minutes 100
    python bench/table.py --report --figure docs/table.svg

The text is English, from Debian's packages or the folder ``--data``, in tokens of a BPE tokenizer
that is learnt from it (kept beside the results). A tenth of its pieces is held out, half of that to
choose settings by, half to report; each peer trains on pieces of its own, all in one process
(``optim.Simulation``), but "torchft" and "torchft-streaming", which torchft runs in processes of
its own with what our "diloco" and "streaming" chose. All rows of one model and length have seen
equally many tokens: ``--steps`` steps of all peers together, whatever their number. At K = 1 "snoo"
is DiLoCo's optimizer alone. "noloco" waits for its partner; "noloco-overlap" (the default of shoal)
and "streaming" apply each of four fragments 16 steps after it was sent, in short rounds after five
eighths of one.

Tuning is the same for every method and inner optimizer, DDP's too: 5 short runs with 4 peers in
rounds of 50 (three settings, then rates), by the validation half; then, as long runs want lower
rates, half of the rate found at full length, and half of that, until it is no better, the first row
of the method deciding for all of them. Codecs, numbers of peers and lengths of rounds take that
choice over. ``--small`` tunes nothing: it takes what was chosen by the short runs in the results
that come with the benchmark.

"loss": nats a token on the reported half, of the slow weights; where peers differ in the end, the
mean over their losses. "over_ddp_muon" and "over_ddp_adamw": how much higher than data parallel
training's with that optimizer, seed by seed, as a part. "bytes_per_param_step": bytes of payload
that leave a peer for each parameter and inner step, with K peers: of the payload that a run handed
to the exchange a pair sends 1, who gathers K - 1, who all-reduces float32 2 (K - 1) / K, as in a
ring, and who averages a share for all (K - 1) / K of that and of the averages that come back
(``shoal.swarm.exchange.cost``; the codecs of both ways stand in the codec's name). "times_fewer":
how many times fewer these are than in data parallel training of as many peers, which all-reduces at
every step. "utilisation": computed, for a model of 10 million parameters with steps of 0.1 s, on
links of Mbit/s "/" milliseconds one way. "loss_at_equal_time": the loss after those steps that fit
into the time in which peers that never wait make all of them, interpolated in the curve of the same
run (whose learning rate was made for more steps). "lag": the steps that an exchange takes there, at
most a round; the loss is that of a run with 16 (or five eighths of a round), whatever the link.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run as a file, its own folder stands there

from bench._page import put_into
from bench._table.figure import write as write_figure
from bench._table.methods import (
    BEST,
    CODECS,
    INNERS,
    PLAN,
    RECIPES,
    SKIPPED,
    SMALL,
    TORCHFT,
    TUNED_EVERY,
    Cell,
    Stage,
    rates,
    recipe,
)
from bench._table.results import HEADS, cells, markdown, rows, wanted
from bench._table.text import TextError, corpus
from bench._table.train import SIZES, Place, Spec, run
from bench.quality import Chosen, Runner, TimeUp, by_five_runs, number, numbers, validation

RESULTS = Path(__file__).resolve().parent / "results" / "table.jsonl"
FIRST_TEXT = RESULTS.with_name("table_first_text.jsonl")
"""Runs on an earlier form of the text, by which the settings of some rows were chosen."""
PAGE = Path(__file__).with_name("results") / "tables.md"
ALT = (
    "How far each method ends above all-reduce with Muon, by the bytes that leave a peer for a "
    "parameter and inner step; four peers"
)
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->"


class Bench:
    """Chooses settings and runs rows."""

    def __init__(self, runner: Runner, text: str, model: str, steps: int, tune_steps: int) -> None:
        self.runner, self.text, self.model, self.steps, self.tune_steps = (
            runner,
            text,
            model,
            steps,
            tune_steps,
        )
        self.known: Sequence[dict[str, Any]] = ()
        """Results of other runs, whose choices are taken over where there are any."""
        self.tunes = True

    def spec(self, cell: Cell, choice: Chosen, seed: int, steps: int) -> Spec:
        lr, outer = choice
        place = (
            self.text,
            self.model,
            cell.method,
            cell.inner,
            cell.codec,
            cell.peers,
            cell.every,
            steps,
        )
        return Spec(*place, lr, tuple(outer.items()), seed)

    def _tuning(self, method: str, inner: str) -> Cell:
        made = recipe(method, inner)
        return Cell(method, inner, CODECS[method][0], made.tuned_at, made.every or TUNED_EVERY)

    def tuned(self, method: str, inner: str) -> Chosen:
        """The learning rate and setting of a method, by 5 runs; or as chosen elsewhere; or the
        method's first setting.
        """
        made = recipe(method, inner)
        method = made.like or method
        cell = self._tuning(method, inner)
        if not self.tunes:
            same = [
                run
                for run in self.known
                if all(run[name] == value for name, value in cell._asdict().items())
            ]
            tried = [
                run
                for run in same
                if run["seed"] == 0 and run["steps"] == min(other["steps"] for other in same)
            ]
            if tried:
                best = min(tried, key=validation)
                return best["lr"], best["outer"]
            return rates(inner)[1], made.settings[0]

        def best_of(tried: Sequence[Chosen]) -> Chosen:
            found = self.runner(self.spec(cell, choice, 0, self.tune_steps) for choice in tried)
            return min(zip(tried, found, strict=True), key=lambda pair: validation(pair[1]))[0]

        return by_five_runs(best_of, made.settings, rates(inner))

    def chosen(self, method: str, inner: str) -> Chosen:
        """What was tuned, its rate halved while that is better at full length, in the row whose
        codec is the method's best.
        """
        lr, outer = self.tuned(method, inner)
        if not self.tunes:
            return lr, outer
        place = self._tuning(recipe(method, inner).like or method, inner)
        row = place._replace(codec=BEST[place.method])
        (best,) = self.runner([self.spec(row, (lr, outer), 0, self.steps)])
        while True:
            (slower,) = self.runner([self.spec(row, (lr / 2, outer), 0, self.steps)])
            if validation(slower) >= validation(best):
                return lr, outer
            lr, best = lr / 2, slower

    def run(self, stage: Stage) -> None:
        """All seeds of all its cells."""
        specs = []
        for seed in stage.seeds:
            for cell in stage.cells:
                spec = self.spec(cell, self.chosen(cell.method, cell.inner), seed, self.steps)
                if self.tunes:
                    self.runner([spec])
                specs.append(spec)
        self.runner(specs)


def asked(options: argparse.Namespace) -> list[Stage]:
    """The plan, less what was not asked for."""
    found = []
    for stage in SMALL if options.small else PLAN:
        kept = [
            cell
            for cell in stage.cells
            if cell.method in options.methods
            and (cell.method not in TORCHFT or importlib.util.find_spec("torchft") is not None)
            and cell.inner in options.inner
            and (not options.peers or cell.peers in (1, *options.peers))
            and (not options.every or cell.every in (1, *options.every))
        ]
        seeds = (
            range(options.seeds)
            if options.small
            else [seed for seed in stage.seeds if seed < options.seeds]
        )
        if kept:
            found.append(Stage(kept, tuple(seeds)))
    return found


def skipped() -> dict[str, str]:
    """What has no row, and why."""
    if importlib.util.find_spec("torchft") is not None:
        return SKIPPED
    return {
        **SKIPPED,
        **dict.fromkeys(TORCHFT, "torchft is not installed (pip install -e '.[bench]')"),
    }


def arguments() -> argparse.Namespace:
    def among(known: Sequence[str]) -> Any:
        def names(text: str) -> list[str]:
            found = text.split(",")
            if not set(found) <= set(known):
                raise argparse.ArgumentTypeError(f"choose among {', '.join(known)}")
            return found

        return names

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FOLDER",
        help="text files; default: what Debian's packages left in /usr/share",
    )
    parser.add_argument("--model", choices=tuple(SIZES), help="default: mini, with --small: micro")
    parser.add_argument(
        "--steps", type=number, help="inner steps of each peer; default: the model's"
    )
    parser.add_argument(
        "--small", action="store_true", help="some rows of the smallest model, without tuning"
    )
    parser.add_argument(
        "--methods",
        type=among(tuple(RECIPES)),
        default=list(RECIPES),
        help="of the plan, separated by commas",
    )
    parser.add_argument(
        "--inner", type=among(INNERS), default=list(INNERS), help="of the plan, separated by commas"
    )
    parser.add_argument(
        "--peers", type=numbers, default=[], help="of the plan, separated by commas"
    )
    parser.add_argument(
        "--every", type=numbers, default=[], help="of the plan, separated by commas"
    )
    parser.add_argument("--seeds", type=number, default=3)
    parser.add_argument(
        "--jobs",
        type=number,
        help="runs at once, each in a process with one thread; default: 1, with --small: cores",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FILE",
        help=f"JSON lines of results; default: {RESULTS.name}; --small: none",
    )
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin no run after so many"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument(
        "--report",
        nargs="?",
        type=Path,
        const=RESULTS,
        metavar="FILE",
        help="run nothing: write its tables",
    )
    parser.add_argument(
        "--into",
        type=Path,
        default=PAGE,
        metavar="PAGE",
        help="with --report: between two comments of that page",
    )
    parser.add_argument(
        "--figure",
        type=Path,
        metavar="SVG",
        help="with --report: the picture, and beside it its numbers as .csv",
    )
    options = parser.parse_args()
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"argument --device: there is no {options.device} here: leave it out")
    return options


def report(options: argparse.Namespace) -> int:
    known = rows(list(Runner(options.report, 1, 0, Spec).results.values()))
    longest: dict[tuple[str, str], int] = {}
    for row in known:
        key = (row["text"], row["model"])
        longest[key] = max(longest.get(key, 0), row["steps"])
    found = [
        row for row in known if row["steps"] == longest[row["text"], row["model"]]
    ]  # the others chose settings
    picture = ""
    if options.figure is not None:
        # Of the model with the most rows: the losses of others differ.
        ((most, _),) = Counter((row["text"], row["model"]) for row in found).most_common(1)
        write_figure([row for row in found if (row["text"], row["model"]) == most], options.figure)
        here = Path(os.path.relpath(options.figure, options.into.parent))
        sheet = here.with_suffix(".csv")
        picture = (
            f"![{ALT}]({here.as_posix()})\n\nThe numbers of the picture: "
            f"[{sheet.name}]({sheet.as_posix()}).\n\n"
        )
    put_into(options.into, picture + markdown(found, known), BEGIN, END)
    return 0


def main() -> int:
    options = arguments()
    if options.report is not None:
        return report(options)
    began = time.monotonic()
    model = options.model or ("micro" if options.small else "mini")
    size, file = SIZES[model], options.resume or (None if options.small else RESULTS)
    steps, stages = options.steps or size.steps, asked(options)
    tune = min(size.tune, max(steps // 2, 1))
    # What is left over after the last round is not exchanged: no more than a fifth of a round.
    uneven = [
        cell.every
        for stage in stages
        for cell in stage.cells
        if 5 * (steps % cell.every) > cell.every or tune % TUNED_EVERY
    ]
    if uneven and not (options.small and all(steps % every == 0 for every in uneven)):
        print(
            f"bench: --steps {steps} must be a multiple of {2 * TUNED_EVERY} and of {uneven[0]}.",
            file=sys.stderr,
        )
        return 2
    cache = (file or RESULTS).parent / "table_text"
    try:
        text = corpus(options.data, size.vocabulary, cache)
    except TextError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    jobs = options.jobs or (len(os.sched_getaffinity(0)) if options.small else 1)
    runner = Runner(
        file,
        jobs,
        began + 60 * options.minutes,
        Spec,
        partial(run, place=Place(cache, options.device)),
    )
    bench = Bench(runner, text.digest, model, steps, tune)
    if options.small:
        known = [Runner(file, 1, 0, Spec).results.values() for file in (RESULTS, FIRST_TEXT)]
        bench.tunes, bench.known = False, [run for runs in known for run in runs]
    done: list[tuple[Any, ...]] = []
    complete = False
    try:
        for stage in stages:
            bench.run(stage)
            done.extend((text.digest, model, *cell, steps) for cell in stage.cells)
        complete = True
    except TimeUp:
        print("bench: the time is up; the same command goes on with what is left.", file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    found = wanted(rows(list(runner.results.values())), done)
    shown = Table(*HEADS, title=f"{model}, {steps} steps, {len(text.tokens):,} tokens of text")
    for row in found:
        shown.add_row(*cells(row))
    Console(stderr=True, width=160).print(shown)
    if options.json:
        machine = {
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        took = round(time.monotonic() - began, 1)
        print(
            json.dumps(
                {
                    "rows": found,
                    "skipped": skipped(),
                    "machine": machine,
                    "complete": complete,
                    "took": took,
                }
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
