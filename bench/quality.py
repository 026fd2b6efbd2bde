"""How good the model is that each method ends with, at equal tokens, and how many bytes that took.

    python bench/quality.py --peers 4 --every 50 --methods ddp,diloco,noloco --seeds 3 --json
    python bench/quality.py --plan --resume bench/results/quality.jsonl --minutes 100
    python bench/quality.py --plan overlap --resume bench/results/quality.jsonl
    python bench/quality.py --report bench/results/quality.jsonl --into bench/results/tables.md

The model is the built-in byte-level GPT (135,808 parameters, context 64), the text Python's
standard library, cut by files into one shard for each peer; a tenth of the files is held out, half
of it to choose settings by, half to report. Peers live in one process (``optim.Simulation``). Inner
optimizer: AdamW (0.9, 0.99), 50 steps of warm-up, cosine to 10 %.

All rows of one number of steps N have seen equally many tokens: N batches of ``--batch`` windows of
64 bytes, whatever the number of peers, each of the K peers making N steps with 1/K of the batch.
With B = batch / K:

    ddp          the mean gradient of the K peers at every step: batch K B, N steps (DiLoCo's table:
                 "8x batch")
    ddp-xK       the same with K times the batch and N/K steps: the simple way to exchange K times
                 less often
    ddp-updates  one machine, batch B, K N steps, K times as long (DiLoCo's table: "8x updates")

At K = 1 "diloco" is SNOO and "lookahead" Lookahead. "diloco-hb" is the heavy-ball form, "noloco"
sends one tensor (pull = lr), "noloco-2" two, "local" averages with a partner, "local-sgd" with
everyone, "none" never (but see "averaged"). What each may choose from: bench/_quality_methods.py.

Tuning, the same for every method at each ``--every``, by seed 0 with ``--tune-steps`` and 4 peers:
its three settings at the learning rate 6e-3, then the best of them at 1.2e-2, and at the next rate
(3e-3 or 2.4e-2) on the side of the better one. (The settings first, because a high outer momentum
wants a low rate.) The choice is made on the validation half. Codecs take over the choice that was
made for the method's own, longer runs that of the short ones; the leaders among those are tried at
half of the rate too.

"loss": nats per byte on the reported half, of the slow weights after ``finish()``; where the peers
differ in the end (gossip, eager, SPARTA), the mean over their losses; "averaged" is the loss of the
mean of their weights instead, one more exchange with everyone.
"bytes_per_param_step": bytes of payload that leave a peer for each parameter and inner step, with K
peers: of the payload that it hands to the exchange a pair sends 1, who gathers K - 1, and who
all-reduces float32 2 (K - 1) / K, as in a ring; DDP's peers too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run as a file, its own folder stands there

from bench._quality_methods import METHODS, RATES, Setting
from bench._quality_plan import PLANS, Cell, Stage
from bench._quality_table import markdown, rows, tables
from bench._quality_train import Spec, run
from shoal.optim import codec_named

BEGIN, END = "<!-- quality: begin -->", "<!-- quality: end -->"
SAME = ("method", "codec", "peers", "every", "steps", "batch", "seed")
Chosen = tuple[float, Setting]
Run = Callable[[Any], dict[str, Any]]


class TimeUp(Exception):
    """The minutes that the benchmark may take are over."""


class Runner:
    """Runs what is not in the file of results yet, and writes each result there as it comes."""

    def __init__(
        self, file: Path | None, jobs: int, until: float, kind: type[Any] = Spec, run: Run = run
    ) -> None:
        self.file, self.jobs, self.until, self.kind, self.run = file, jobs, until, kind, run
        self.results: dict[str, dict[str, Any]] = {}
        if file is not None and file.exists():
            text = file.read_text(encoding="utf-8")
            whole = text[: text.rfind("\n") + 1]
            if whole != text:
                file.write_text(
                    whole, encoding="utf-8"
                )  # the last line was cut off when a run was stopped
            self.take(whole.splitlines())

    def take(self, lines: Iterable[str]) -> None:
        """Count these results as run; they are not written into the file."""
        for line in lines:
            self._keep(json.loads(line))

    def _keep(self, result: dict[str, Any]) -> dict[str, Any]:
        names = [name for name in self.kind.__dataclass_fields__ if name != "outer"]
        spec = self.kind(
            **{name: result[name] for name in names}, outer=tuple(result["outer"].items())
        )
        self.results[spec.key] = result
        return result

    def _finished(self, result: dict[str, Any]) -> None:
        self._keep(result)
        loss = "diverged" if result["loss"] is None else f"{result['loss']:.4f}"
        about = " ".join(
            f"{name}={result[name]}"
            for name in ("method", "codec", "peers", "every", "steps", "lr", "outer", "seed")
        )
        print(
            f"{time.strftime('%H:%M:%S')} {about}: {loss} in {result.get('seconds', 0)} s",
            file=sys.stderr,
            flush=True,
        )
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(result) + "\n")

    def __call__(self, specs: Iterable[Any]) -> list[dict[str, Any]]:
        """The results of these runs, in their order. TimeUp before a run that would begin too
        late.
        """
        specs = list(specs)
        missing = [spec for spec in dict.fromkeys(specs) if spec.key not in self.results]
        if self.jobs == 1 or len(missing) == 1:
            for spec in missing:
                self._check_time()
                self._finished(self.run(spec))
        elif missing:
            self._check_time()
            with ProcessPoolExecutor(self.jobs, multiprocessing.get_context("spawn")) as pool:
                for result in pool.map(self.run, missing):
                    self._finished(result)
        return [self.results[spec.key] for spec in specs]

    def _check_time(self) -> None:
        if time.monotonic() > self.until:
            raise TimeUp


def validation(result: dict[str, Any]) -> float:
    value = result["validation"]
    return float("inf") if value is None else float(value)


def by_five_runs(
    best: Callable[[list[Chosen]], Chosen], settings: Sequence[Setting], rates: Sequence[float]
) -> Chosen:
    """The best of three settings at the second of four rates, then at the third rate and the one
    beyond the better side.
    """
    middle, higher = rates[1:3]
    _, setting = best([(middle, setting) for setting in settings])
    up = best([(middle, setting), (higher, setting)])[0] == higher
    return best([(rate, setting) for rate in (rates[1:] if up else rates[:3])])


class Quality:
    """Chooses settings and runs cells."""

    def __init__(self, runner: Runner, tune_steps: int, batch: int, lr: float | None) -> None:
        self.runner, self.tune_steps, self.batch, self.lr = runner, tune_steps, batch, lr

    def spec(self, cell: Cell, chosen: Chosen, seed: int) -> Spec:
        lr, setting = chosen
        return Spec(
            cell.method,
            cell.codec,
            cell.peers,
            cell.every,
            cell.steps,
            self.batch,
            lr,
            tuple(setting.items()),
            seed,
        )

    def _best(self, cell: Cell, tried: Sequence[Chosen]) -> Chosen:
        results = self.runner(self.spec(cell, chosen, 0) for chosen in tried)
        return min(zip(tried, results, strict=True), key=lambda pair: validation(pair[1]))[0]

    def tuned(self, method: str, every: int) -> Chosen:
        """The learning rate and setting of a method at one ``every``; 5 runs."""
        recipe = METHODS[method]
        if self.lr is not None:
            return self.lr, recipe.settings[0]
        cell = Cell(method, recipe.codec, recipe.tuned_at, every, self.tune_steps)
        by_five_runs(lambda tried: self._best(cell, tried), recipe.settings, RATES[recipe.inner])
        like = self.spec(
            cell, (0.0, {}), 0
        )  # a file of results may hold more that was tried: the best of all is taken
        tried = [
            result
            for result in self.runner.results.values()
            if all(result[name] == getattr(like, name) for name in SAME)
        ]
        best = min(tried, key=validation)
        return best["lr"], best["outer"]

    def run(self, cell: Cell, seeds: Sequence[int], again: bool | Cell) -> None:
        """All seeds of a cell; ``again``: at half of the learning rate, if seed 0 of it, or of the
        cell given, is better there.
        """
        method = METHODS[cell.method].like or cell.method
        chosen = self.tuned(method, METHODS[method].every or cell.tuned_every or cell.every)
        if again and self.lr is None:
            plain = (
                again
                if isinstance(again, Cell)
                else cell._replace(codec=METHODS[cell.method].codec)
            )
            chosen = self._best(plain, [chosen, (chosen[0] / 2, chosen[1])])
        self.runner(self.spec(cell, chosen, seed) for seed in seeds)


def _cells(options: argparse.Namespace) -> list[Cell]:
    found = []
    for method in options.methods:
        recipe = METHODS[method]
        for codec in (
            options.codecs if recipe.make is not None and options.codecs else [recipe.codec]
        ):
            if recipe.weights and codec_named(codec).displacement:
                print(
                    f"skipped: {method} with {codec}, which is for pseudo-gradients only",
                    file=sys.stderr,
                )
                continue
            for peers in options.peers:
                for every in [recipe.every] if recipe.every else options.every:
                    found.append(Cell(method, codec_named(codec).name, peers, every, options.steps))
    return found


def numbers(text: str) -> list[int]:
    values = [int(part) for part in text.split(",")]
    if not values or min(values) < 1:
        raise argparse.ArgumentTypeError("must be whole numbers of at least 1, separated by commas")
    return values


def number(text: str) -> int:
    (value,) = numbers(text)
    return value


def _methods(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(METHODS):
        raise argparse.ArgumentTypeError(f"choose among {', '.join(METHODS)}")
    return list(dict.fromkeys(names))


def _codecs(text: str) -> list[str]:
    try:
        return [codec_named(name).name for name in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peers", type=numbers, default=[8], help="numbers of peers, separated by commas"
    )
    parser.add_argument(
        "--every",
        type=numbers,
        default=[50],
        help="inner steps between two exchanges, separated by commas",
    )
    parser.add_argument(
        "--methods", type=_methods, default=list(METHODS), help="separated by commas; default: all"
    )
    parser.add_argument(
        "--codecs",
        type=_codecs,
        help="separated by commas; default: float32, and the sparse one for sparseloco",
    )
    parser.add_argument("--seeds", type=number, default=3, help="runs of each row")
    parser.add_argument("--steps", type=number, default=500, help="inner steps of each peer")
    parser.add_argument(
        "--batch", type=number, default=32, help="windows a step of all peers together"
    )
    parser.add_argument(
        "--lr",
        type=float,
        help="inner learning rate, with each method's default setting: nothing is tuned then",
    )
    parser.add_argument(
        "--tune-steps",
        type=number,
        default=500,
        help="inner steps of each peer in the runs that choose",
    )
    parser.add_argument(
        "--jobs", type=number, default=1, help="runs at once, each in a process with one thread"
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FILE",
        help="JSON lines of results: what is there is not run again",
    )
    parser.add_argument(
        "--plan",
        nargs="?",
        const="methods",
        choices=PLANS,
        help="run a plan of bench/_quality_plan.py instead",
    )
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin no run after so many"
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="run nothing: print the tables of a file as Markdown",
    )
    parser.add_argument(
        "--into",
        type=Path,
        metavar="PAGE",
        help=f"with --report: write them between {BEGIN} and {END} of a page",
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    wrong = [peers for peers in options.peers if options.batch % peers]
    if wrong:
        parser.error(
            f"argument --batch: {options.batch} windows cannot be shared out equally among "
            f"{wrong[0]} peers"
        )
    wrong = [every for every in options.every if options.steps % every]
    if wrong and not options.plan:
        parser.error(
            f"argument --steps: must be a multiple of --every ({wrong[0]}), else the last steps "
            "would count for nothing"
        )
    return options


def report(options: argparse.Namespace) -> int:
    text = markdown(rows(list(Runner(options.report, 1, 0).results.values())))
    if options.into is None:
        print(text)
        return 0
    page = options.into.read_text(encoding="utf-8")
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        print(
            f"bench: {options.into} has no place for the tables: put {BEGIN} and {END} there.",
            file=sys.stderr,
        )
        return 2
    head, tail = page.split(BEGIN)[0], page.split(END)[1]
    options.into.write_text(f"{head}{BEGIN}\n{text}{END}{tail}", encoding="utf-8")
    return 0


def main() -> int:
    options = arguments()
    if options.report is not None:
        return report(options)
    began = time.monotonic()
    runner = Runner(options.resume, options.jobs, began + 60 * options.minutes)
    quality = Quality(runner, options.tune_steps, options.batch, options.lr)
    done, complete = [], False
    try:
        for stage in (
            PLANS[options.plan] if options.plan else [Stage(_cells(options), range(options.seeds))]
        ):
            for cell in stage.cells:
                quality.run(cell, stage.seeds, stage.again)
                done.append(cell)
        complete = True
    except TimeUp:
        print("bench: the time is up; the same command with --resume goes on.", file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    asked = {(cell.method, cell.codec, cell.peers, cell.every, cell.steps) for cell in done}
    found = [
        row
        for row in rows(list(runner.results.values()))
        if tuple(row[name] for name in Cell._fields[:5]) in asked
    ]
    for table in tables(found):
        Console(stderr=True, width=140).print(table)
    if options.json:
        machine = {
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        print(
            json.dumps(
                {
                    "rows": found,
                    "machine": machine,
                    "complete": complete,
                    "took": round(time.monotonic() - began, 1),
                }
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
