"""Held-out loss with hostile peers: none, undefended, with the checks of updates alone, and with the robust rule too.

    python bench/adversaries.py                     # 8 peers, 2 of them hostile; all attacks, 3 seeds: a while
    python bench/adversaries.py --attacks 'sign flip' --seeds 0 --json
    python bench/adversaries.py --resume bench/results/adversaries.jsonl --into docs/benchmarks.md

Peers are simulated in one process (optim/simulation.py); they read the Python standard library with the GPT of the built-in task.
The hostile ones train and follow the protocol, but contribute what bench/_attacks.py says. ``undefended`` is what the exchange does
by itself, which refuses NaN and infinity; ``checked`` is outer.suspect alone, ``defended`` with outer.robust too; ``public`` is the
default of a public swarm: outer.robust, and for pairs outer.check_loss.
The loss is the mean of the honest peers', in nats per byte, on held-out files, with their slow weights.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from itertools import islice
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench._attacks import ATTACKS, Board, Honest, Hostile
from bench._page import put_into
from bench._quality_train import Diverged, QualityText, backward
from shoal.node.task import Shard
from shoal.node.training.loss_trial import LossTrial
from shoal.optim import Simulation, method_named
from shoal.optim.exchange.simulation import SimulatedExchange
from shoal.swarm.exchange.loss_check import LossCheck
from shoal.swarm.exchange.robust import DistanceScreen, Robust

METHODS: dict[str, tuple[Robust, dict[str, float]]] = {
    "noloco": ("clipped-gossip", {"lr": 1.0, "momentum": 0.3}),
    "diloco": ("centered-clip", {"lr": 1.0, "momentum": 0.3}),
}
DEFENCES = ("undefended", "checked", "defended", "public")
INNER_LR = 0.012
BEGIN, END = "<!-- adversaries: begin -->\n", "<!-- adversaries: end -->"
Row = dict[str, Any]


@cache
def task_of(batch: int) -> QualityText:
    """The built-in task with a smaller model (42,112 parameters), for there are many runs."""
    return QualityText(batch=batch, layers=2, width=32, heads=2)


def defence_of(name: str, method: str, times: float) -> DistanceScreen:
    """What an honest peer does."""
    robust = METHODS[method][0] if name in ("defended", "public") else "none"
    suspect = 3.0 if name in ("checked", "defended") else 0.0
    return DistanceScreen(robust=robust, suspect=suspect, times=times, sends=method_named(method).sends)


@torch.no_grad()
def held_out(task: QualityText, model: torch.nn.Module) -> float:
    """Nats per byte on 256 windows."""
    windows = task.halves["loss"][:256]
    return float(task.loss(model, (windows[:, :-1], windows[:, 1:])))


def run(method: str, attack: str, screen: str, seed: int, options: argparse.Namespace) -> Row:
    """One training run. ``loss`` is None if it diverged."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    task, board = task_of(options.batch), Board()
    names = [f"peer{number}" for number in range(options.peers)]
    bad = set() if attack == "none" else set(names[-options.hostile :])
    watches = {name: defence_of(screen, method, options.times) for name in names if name not in bad}
    chosen = method_named(method)

    def peer(exchange: SimulatedExchange) -> float:
        torch.manual_seed(seed)
        model = task.model()
        inner = task.inner_optimizer(model.parameters())
        for group in inner.param_groups:
            group["lr"] = INNER_LR
        if exchange.peer in bad:
            wire: Honest | Hostile = Hostile(exchange, board, attack)
        else:
            wire = Honest(exchange, board)
        lag = {"lag": 0} if "lag" in chosen.knobs else {}
        optimizer = chosen.make(inner, wire, every=options.every, **METHODS[method][1], **lag)
        if isinstance(wire, Hostile) and chosen.sends == "weights":
            wire.slow = optimizer.slow
        if screen == "public" and chosen.group == "pair" and exchange.peer in watches:
            shard = Shard(names.index(exchange.peer), len(names), seed)
            trial = LossTrial(task, model, optimizer, torch.device("cpu"), shard, nullcontext, lambda line: None)
            watches[exchange.peer].loss_check = LossCheck(trial)
        scheduler = task.lr_scheduler(optimizer, options.steps)
        data = islice(task.batches(Shard(names.index(exchange.peer), len(names), seed)), options.steps)
        try:
            for batch in data:
                exchange.sleep(1.0)
                backward(task, model, batch)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            optimizer.finish()
        except Diverged:
            return math.nan
        with optimizer.averaged():
            return held_out(task, model)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        size = 2 if chosen.group == "pair" else len(names)
        losses = Simulation[float](names, seed=seed, size=size, wait=30.0, screens=watches).run(peer)
    honest = [losses[name] for name in watches]
    loss = mean(honest) if all(math.isfinite(one) for one in honest) else None
    refused = [found.peer for watch in watches.values() for found in watch.rejections()]
    return {
        "method": method, "attack": attack, "defence": screen, "seed": seed, "loss": loss,
        "refused_hostile": sum(peer in bad for peer in refused), "refused_honest": sum(peer not in bad for peer in refused),
        "seconds": round(time.perf_counter() - began, 1),
        "setting": setting(options),
    }  # fmt: skip


def setting(options: argparse.Namespace) -> dict[str, Any]:
    """What runs must have in common to stand in one table."""
    return {name: getattr(options, name) for name in ("peers", "hostile", "every", "steps", "batch", "times")}


def cells(options: argparse.Namespace) -> list[tuple[str, str, str, int]]:
    """All runs, those first that say most."""
    pairs = [(method, seed) for seed in options.seeds for method in options.methods]
    clean = [(method, "none", screen, seed) for method, seed in pairs for screen in options.defences]
    return clean + [
        (method, attack, screen, seed) for attack in options.attacks for method, seed in pairs for screen in options.defences
    ]


def _cell(rows: Sequence[Row], plain: Mapping[int, float]) -> str:
    """Mean and deviation of the loss, and how far above the plain runs of the same seeds it is."""
    lost = sum(row["loss"] is None for row in rows)
    if lost or not all(row["seed"] in plain for row in rows):
        return f"diverged ({lost} of {len(rows)})" if lost else "no plain run"
    if not rows:
        return ""
    losses = [row["loss"] for row in rows]
    spread = f" ± {stdev(losses):.3f}" if len(losses) > 1 else ""
    return f"{mean(losses):.3f}{spread} ({100 * (mean(losses) / mean(plain[row['seed']] for row in rows) - 1):+.1f} %)"


def table(found: Sequence[Row]) -> str:
    """Markdown: a line for each method and attack, loss and the distance to the plain mean without attackers."""
    shown = [screen for screen in DEFENCES if any(row["defence"] == screen for row in found)]
    heads = ("method", "attack", *shown, "refused: hostile, honest", "seeds")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for method in dict.fromkeys(row["method"] for row in found):
        mine = [row for row in found if row["method"] == method]
        plain = {row["seed"]: row["loss"] for row in mine if row["attack"] == "none" and row["defence"] == "undefended"}
        for attack in dict.fromkeys(row["attack"] for row in mine):
            rows = [[row for row in mine if row["attack"] == attack and row["defence"] == screen] for screen in shown]
            losses = [_cell(some, plain) for some in rows]
            refused = [sum(row[who] for row in rows[-1]) for who in ("refused_hostile", "refused_honest")]
            seeds = len({row["seed"] for some in rows for row in some})
            lines.append(f"| {method} | {attack} | {' | '.join(losses)} | {refused[0]}, {refused[1]} | {seeds} |")
    return "\n".join(lines) + "\n"


def harms(found: Sequence[Row]) -> list[Row]:
    """How much higher the loss is than without attackers and defence, as a part, for each method, attack and defence.

    None where a run diverged, or where no plain run has its seed.
    """
    plain = {
        (row["method"], row["seed"]): row["loss"] for row in found if (row["attack"], row["defence"]) == ("none", "undefended")
    }
    cells: dict[tuple[str, str, str], list[Row]] = {}
    for row in found:
        cells.setdefault((row["method"], row["attack"], row["defence"]), []).append(row)
    harms = []
    for (method, attack, screen), rows in cells.items():
        losses = [row["loss"] for row in rows if row["loss"] is not None]
        before = [value for row in rows if (value := plain.get((method, row["seed"]))) is not None]
        harm = mean(losses) / mean(before) - 1 if len(losses) == len(before) == len(rows) else None
        harms.append({"method": method, "attack": attack, "defence": screen, "harm": harm, "seeds": len(rows)})
    return harms


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--attacks", nargs="+", choices=list(ATTACKS), default=list(ATTACKS))
    parser.add_argument("--defences", nargs="+", choices=DEFENCES, default=["undefended", "public"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--hostile", type=int, default=2)
    parser.add_argument("--steps", type=int, default=150, help="inner steps of each peer")
    parser.add_argument("--every", type=int, default=10, help="inner steps in a round")
    parser.add_argument("--batch", type=int, default=4, help="windows of 64 bytes in a step of a peer")
    parser.add_argument("--times", type=float, default=1.0, help="radius of the robust rule, in median distances")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="a line for each run; those that are there are not run again")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="write the table between two comments of a page")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--json", action="store_true", help="print the runs as one JSON object")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """The program."""
    options = _options(arguments)
    there = options.resume.read_text(encoding="utf-8").splitlines() if options.resume and options.resume.exists() else []
    found = [row for row in map(json.loads, there) if row["setting"] == setting(options)]
    done = {(row["method"], row["attack"], row["defence"], row["seed"]) for row in found}
    for cell in () if options.report else cells(options):
        if cell in done:
            continue
        row = run(*cell, options)
        found.append(row)
        print(f"{' / '.join(map(str, cell))}: loss {row['loss']}, {row['seconds']} s", file=sys.stderr)
        if options.resume is not None:
            with options.resume.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    if options.into is not None:
        put_into(options.into, table(found), BEGIN, END)
    print(json.dumps({"setting": setting(options), "rows": harms(found), "runs": found}) if options.json else table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
