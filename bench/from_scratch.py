"""Groups and pairs of real nodes against all-reduce with the same inner optimizer, from random
weights: each row at the best of three inner rates.

    python bench/from_scratch.py --size 10m --data a.txt,b.txt,c.txt --minutes 14
    python bench/from_scratch.py --size tiny --data a.txt,b.txt --steps 200 --kinds alike

Each run is one of bench/real.py: nodes are processes of `shoal up` and `shoal join`, all-reduce is
computed in one process. The rates are tried on alike data in runs of --trial steps and one seed;
all other runs have the best of them. A trial that fails, as training does that diverges, is the
worst; any other run that fails ends the bench. Bytes are those that the nodes have sent, by all of
them, as they count them; all-reduce's are computed for a ring. What has been run already, also a
trial that failed, is not run again; a run that was cut off goes on from its checkpoints if --folder
is the same.

"alike": every node has text of all files; "unlike": the text, in the order of the files, is cut
into as many parts of equal size as there are nodes. What is held out is the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run as a file, its own folder stands there

from bench._quality_table import percent
from bench._real_task import FILE, SIZES
from bench.quality import Runner, TimeUp, number

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "from_scratch.jsonl"
KINDS = ("alike", "unlike")
NODES = 4
RATES = {"muon": (0.01, 0.02, 0.04), "adamw": (1e-3, 3e-3, 6e-3)}
STEERED = (("lr", 1.0), ("momentum", 0.3))


class Method(NamedTuple):
    """A way to train, at a rate that is still to be chosen."""

    name: str
    inner: str
    codec: str
    every: int
    outer: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        return f"{self.name}, {self.inner}, {self.codec}, every {self.every}"


ALL_REDUCE = Method("ddp", "muon", "float32", 1)
METHODS = (
    ALL_REDUCE,
    Method("streaming", "muon", "sign+ef", 16, STEERED),
    Method("noloco", "muon", "mod4", 25, STEERED),
    Method("diloco", "muon", "sign+ef", 16, STEERED),
    Method("ddp", "adamw", "float32", 1),
)
"""What all others are held against first, then the two defaults."""
FAILED = {"loss_last": None, "loss_ddp": None, "bytes_sent": 0, "ddp_bytes": 0, "params": None}
"""What a trial that failed has come to."""


@dataclass(frozen=True)
class Spec:
    """One run. Its JSON is its name in the file of results."""

    model: str
    data: str
    """Names of the files, without their folders."""
    kind: str
    method: str
    inner: str
    codec: str
    peers: int
    every: int
    steps: int
    batch: int
    context: int
    lr: float
    outer: tuple[tuple[str, float], ...]
    seed: int

    @property
    def key(self) -> str:
        return json.dumps({**dataclasses.asdict(self), "outer": dict(self.outer)}, sort_keys=True)


def spec_of(method: Method, lr: float, kind: str, steps: int, seed: int, options: Any) -> Spec:
    """Return the run of a method at a rate."""
    names = ",".join(Path(name).name for name in options.data.split(","))
    return Spec(
        options.size,
        names,
        kind,
        method.name,
        method.inner,
        method.codec,
        NODES,
        method.every,
        steps,
        options.batch,
        options.context,
        lr,
        method.outer,
        seed,
    )


def trial_of(method: Method, lr: float, options: Any) -> Spec:
    """Return the run that tries a rate of a method."""
    return spec_of(method, lr, "alike", options.trial, 0, options)


def is_trial(spec: Spec, options: Any) -> bool:
    return (spec.kind, spec.steps, spec.seed) == ("alike", options.trial, 0)


def command(spec: Spec, options: Any) -> list[str]:
    """Return the run as a command line of bench/real.py, without the interpreter."""
    values = {
        "--from-scratch": spec.model,
        "--data": options.data,
        "--most": options.most,
        "--nodes": spec.peers,
        "--steps": spec.steps,
        "--every": spec.every,
        "--batch": spec.batch,
        "--context": spec.context,
        "--inner": spec.inner,
        "--lr": spec.lr,
        "--schedule": "cosine",
        "--warmup": max(1, spec.steps // 30),
        "--held": options.held,
        "--seed": spec.seed,
        "--alone": 0,
    }
    line = [str(HERE / "real.py"), "--json"]
    for name, value in values.items():
        line += [name, str(value)]
    line += [f"--node={flag}" for flag in options.node]
    if spec.kind == "unlike":
        line.append("--unlike")
    if spec.method == "ddp":
        return [*line, "--only-ddp"]
    steered = {"codec": spec.codec, **dict(spec.outer)}
    line += [f"--outer=--set=outer.{name}={value}" for name, value in steered.items()]
    return [*line, "--method", spec.method]


def run(spec: Spec, options: Any) -> dict[str, Any]:
    """Train, and return the run with its figures. SystemExit if it fails and is no trial."""
    line = [sys.executable, *command(spec, options)]
    if options.folder is not None:
        name = spec.key.translate(str.maketrans("", "", '"{}[] :')).replace(",", "_")
        line += ["--folder", str(options.folder / name)]
    began = time.monotonic()
    # Its stderr is this one's: why it failed stands there.
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == 0:
        found = json.loads(done.stdout.splitlines()[-1])
    else:
        failed = f"failed with code {done.returncode}: {' '.join(line)}"
        if not is_trial(spec, options):
            raise SystemExit(f"bench: this run {failed}")
        print(f"bench: this trial {failed}", file=sys.stderr, flush=True)
        found = FAILED
    ours = {**dataclasses.asdict(spec), "outer": dict(spec.outer), "bench": "from_scratch"}
    alone = spec.method == "ddp"
    return {
        **ours,
        "loss": found["loss_ddp" if alone else "loss_last"],
        "bytes_sent": found["ddp_bytes" if alone else "bytes_sent"],
        "params": found["params"],
        "tokens": spec.steps * spec.peers * spec.batch * spec.context,
        "exchanges": found.get("exchanges"),
        "without_partner": found.get("pairs_none"),
        "machine": options.machine,
        "seconds": round(time.monotonic() - began, 1),
    }


def best_rate(results: Sequence[dict[str, Any]]) -> float:
    """Return the rate of the lowest loss; a run without one has diverged."""
    ended = [result for result in results if result["loss"] is not None]
    if not ended:
        raise SystemExit(
            "bench: no rate of the trial came to its end: remove these trials from the file of "
            "results (--resume) to make them again, and read why they fail."
        )
    return float(min(ended, key=lambda result: result["loss"])["lr"])


def wanted(runner: Runner, options: Any) -> Iterator[Spec]:
    """Yield the runs that count, the trials of a method's rates made when its first run is due."""
    rates: dict[Method, float] = {}
    for seed in range(options.seeds):
        for kind in options.kinds:
            for method in METHODS:
                if method not in rates:
                    tried = RATES[method.inner]
                    trials = [trial_of(method, lr, options) for lr in tried]
                    rates[method] = best_rate(runner(trials))
                yield spec_of(method, rates[method], kind, options.steps, seed, options)


def table(results: Sequence[dict[str, Any]]) -> Table:
    """Return the runs, each against all-reduce with Muon of the same data and seed."""
    shown = Table("data", "seed", "method", "rate", "held-out loss", "over all-reduce", "bytes")
    base = {
        (one["kind"], one["seed"]): one
        for one in results
        if (one["method"], one["inner"]) == (ALL_REDUCE.name, ALL_REDUCE.inner)
    }
    for one in results:
        best = base.get((one["kind"], one["seed"]))
        over = fewer = ""
        if best is not None and best["loss"] and one["loss"]:
            over = percent(one["loss"] / best["loss"] - 1, None)
        if best is not None and best["bytes_sent"] and one["bytes_sent"]:
            fewer = f", {best['bytes_sent'] / one['bytes_sent']:.0f} times fewer"
        shown.add_row(
            one["kind"],
            str(one["seed"]),
            f"{one['method']}, {one['inner']}, {one['codec']}",
            f"{one['lr']:g}",
            "diverged" if one["loss"] is None else f"{one['loss']:.3f}",
            over,
            f"{one['bytes_sent'] / 1e6:,.1f} MB{fewer}",
        )
    return shown


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=sorted(SIZES), default="10m")
    parser.add_argument("--data", required=True, help="text files, separated by commas")
    parser.add_argument("--most", type=number, default=FILE, help="characters of each file")
    parser.add_argument("--steps", type=number, default=3000)
    parser.add_argument("--trial", type=number, help="steps; default: a tenth of --steps")
    parser.add_argument("--batch", type=number, default=16)
    parser.add_argument("--context", type=number, default=256)
    parser.add_argument("--held", type=number, default=128, help="held-out windows")
    parser.add_argument("--seeds", type=number, default=1)
    parser.add_argument("--kinds", choices=KINDS, action="append", help="default: both")
    parser.add_argument("--node", action="append", default=[], help="a further flag of each node")
    parser.add_argument("--machine", default="", help="what it is, for the results")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after")
    parser.add_argument("--folder", type=Path, help="keep the nodes' folders here")
    parser.add_argument("--resume", type=Path, default=RESULTS, metavar="FILE", help="results")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args(given)
    options.trial = options.trial or max(1, options.steps // 10)
    options.kinds = options.kinds or KINDS
    options.data = ",".join(str(Path(name).resolve()) for name in options.data.split(","))
    return options


def main() -> int:
    options = arguments()
    until = time.monotonic() + 60 * options.minutes
    runner = Runner(options.resume, 1, until, Spec, partial(run, options=options))
    found: list[dict[str, Any]] = []
    complete = False
    try:
        for spec in wanted(runner, options):
            found += runner([spec])
        complete = True
    except TimeUp:
        print("bench: the time is up; the same command goes on with what is left.", file=sys.stderr)
    Console(stderr=True, width=140).print(table(found))
    if options.json:
        print(json.dumps({"rows": found, "complete": complete}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
