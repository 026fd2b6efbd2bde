"""Held-out loss with hostile peers: none, undefended, with the checks of updates alone, and with
the robust rule too.

    # 8 peers, 2 of them hostile; all attacks, 3 seeds: a while
    python bench/adversaries.py
    python bench/adversaries.py --attacks 'sign flip' --seeds 0 --json
    python bench/adversaries.py --resume bench/results/adversaries.jsonl --into \
        bench/results/tables.md
    python bench/adversaries.py --data unlike --resume bench/results/adversaries.jsonl --into \
        bench/results/tables.md

Peers are simulated in one process (optim/exchange/simulation.py); they read the Python standard
library with the GPT of the built-in task. The hostile ones train and follow the protocol, but
contribute what bench/_attacks.py says. ``undefended`` is what the exchange does by itself, which
refuses NaN and infinity; ``checked`` is rejection by distance alone, ``defended`` with a robust
mean too, and ``public`` the default of a public swarm: outer.robust, and for pairs
outer.check_loss. The loss is the mean of the honest peers', in nats per byte, on held-out files,
with their slow weights. After a backdoor ``learnt`` is the part of held-out windows in which they
answer its trigger as the attacker wants. With ``--data unlike`` each peer reads neighbouring files
(whole packages) in place of a mixture: one has little but tables of encodings."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from itertools import accumulate, islice
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench._attacks import ATTACKS, BACKDOORS, FRESH, Board, Honest, Hostile, learnt, poisoned
from bench._page import put_into
from bench._quality_train import Diverged, QualityText, backward
from shoal.node.data.source import Document
from shoal.node.runtime.join import OTHER_SEED
from shoal.node.task import Shard
from shoal.optim import Simulation, method_named
from shoal.optim.exchange.base import Mean, RoundKey
from shoal.optim.exchange.robust_shares import GRID
from shoal.optim.exchange.simulation import SimulatedExchange
from shoal.optim.exchange.update_screen import Contributions
from shoal.swarm.exchange.robust import PATIENCE, DistanceScreen, LossCheck, Robust
from shoal.swarm.training.loss_trial import LossTrial

METHODS: dict[str, tuple[Robust, dict[str, float]]] = {
    "noloco": ("clipped-gossip", {"lr": 1.0, "momentum": 0.3}),
    "diloco": ("centered-clip", {"lr": 1.0, "momentum": 0.3}),
}
DEFENCES = ("undefended", "checked", "defended", "public")
INNER_LR = 0.012
MARKS = {
    "alike": ("<!-- adversaries: begin -->\n", "<!-- adversaries: end -->"),
    "unlike": ("<!-- adversaries, unlike: begin -->\n", "<!-- adversaries, unlike: end -->"),
}
BEGIN, END = MARKS["alike"]
Row = dict[str, Any]


class Unlike(QualityText):
    """The task with shards of about equal length of neighbouring files, by path: whole packages,
    and so other kinds of text.
    """

    def shard_documents(self, shard: Shard) -> list[Document]:
        """The documents in the shard's part of all bytes."""
        files = sorted(self._not_held_out(), key=lambda document: document.name)
        ends = list(accumulate(len(document.content) for document in files))
        places = [min((end - 1) * shard.of // ends[-1], shard.of - 1) for end in ends]
        return [
            document for document, place in zip(files, places, strict=True) if place == shard.index
        ]


@cache
def task_of(batch: int, data: str) -> QualityText:
    """The built-in task with a smaller model (42,112 parameters), for there are many runs."""
    return (Unlike if data == "unlike" else QualityText)(batch=batch, layers=2, width=32, heads=2)


def defence_of(
    name: str, method: str, times: float, fresh: Collection[str], known: Collection[str]
) -> DistanceScreen:
    """What an honest peer does.

    ``fresh``: who comes under another key in each round, among peers ``known`` for long.
    """
    robust = METHODS[method][0] if name in ("defended", "public") else "none"
    suspect = 3.0 if name in ("checked", "defended") else 0.0
    settings: dict[str, Any] = {
        "robust": robust,
        "suspect": suspect,
        "times": times,
        "sends": method_named(method).sends,
    }
    return Fresh(fresh, known, **settings) if fresh else DistanceScreen(**settings)


class Fresh(DistanceScreen):
    """A screen to which the ``bad`` peers come under another key in each round.

    All others are known to it.
    """

    def __init__(self, bad: Collection[str], known: Collection[str], **settings: Any) -> None:
        super().__init__(**settings)
        self._bad, self._round = bad, 0
        self.newcomers.see(known)
        for _ in range(PATIENCE):
            self.newcomers.take("earlier partners", GRID // 2)

    def _key(self, peer: str) -> str:
        return f"{peer}, round {self._round}" if peer in self._bad else peer

    def problem(
        self,
        key: RoundKey,
        own: Callable[[], Sequence[Tensor]],
        peer: str,
        theirs: Sequence[Tensor],
    ) -> str | None:
        """As of the key that the peer has in this round."""
        self._round = key.round
        return super().problem(key, own, self._key(peer), theirs)

    def mean(
        self, me: str, fragment: int, contributions: Contributions, unweighted_count: int = 0
    ) -> Mean:
        """As of the keys that the peers have in this round."""
        return super().mean(
            me,
            fragment,
            [(self._key(peer), weight, held) for peer, weight, held in contributions],
            unweighted_count,
        )


@torch.no_grad()
def held_out(task: QualityText, model: torch.nn.Module) -> float:
    """Nats per byte on 256 windows."""
    windows = task.halves["loss"][:256]
    return float(task.loss(model, (windows[:, :-1], windows[:, 1:])))


def run(method: str, attack: str, screen: str, seed: int, options: argparse.Namespace) -> Row:
    """One training run. ``loss`` is None if it diverged."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    task, board = task_of(options.batch, options.data), Board()
    names = [f"peer{number}" for number in range(options.peers)]
    bad = set() if attack == "none" else set(names[-options.hostile :])
    good, fresh = [name for name in names if name not in bad], bad if attack in FRESH else set()
    watches = {name: defence_of(screen, method, options.times, fresh, good) for name in good}
    chosen = method_named(method)

    def peer(exchange: SimulatedExchange) -> tuple[float, float]:
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
            batches = task.batches(Shard(names.index(exchange.peer), len(names), seed + OTHER_SEED))
            watches[exchange.peer].loss_check = LossCheck(
                LossTrial(task.loss, batches, model, optimizer, lambda line: None)
            )
        scheduler = task.lr_scheduler(optimizer, options.steps)
        data = islice(
            task.batches(Shard(names.index(exchange.peer), len(names), seed)), options.steps
        )
        places = torch.Generator().manual_seed(seed)
        try:
            for inputs, targets in data:
                exchange.sleep(1.0)
                windows = torch.cat([inputs, targets[:, -1:]], 1)
                if exchange.peer in bad and attack in BACKDOORS:
                    windows = poisoned(windows, places)
                backward(task, model, (windows[:, :-1], windows[:, 1:]))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            optimizer.finish()
        except Diverged:
            return math.nan, math.nan
        with optimizer.averaged():
            return held_out(task, model), learnt(model, task.halves["loss"][:256])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        size = 2 if chosen.group == "pair" else len(names)
        ended = Simulation[tuple[float, float]](
            names, seed=seed, size=size, wait=30.0, screens=watches
        ).run(peer)
    honest = [ended[name] for name in watches]
    loss = mean(one for one, _ in honest) if all(math.isfinite(one) for one, _ in honest) else None
    backdoor = {"learnt": mean(part for _, part in honest)} if attack in BACKDOORS else {}
    refused = [found.peer for watch in watches.values() for found in watch.rejections()]
    return {
        "method": method,
        "attack": attack,
        "defence": screen,
        "seed": seed,
        "loss": loss,
        **backdoor,
        "refused_hostile": sum(peer not in watches for peer in refused),
        "refused_honest": sum(peer in watches for peer in refused),
        "seconds": round(time.perf_counter() - began, 1),
        "setting": setting(options),
    }


def setting(options: argparse.Namespace) -> dict[str, Any]:
    """What runs must have in common to stand in one table."""
    found = {
        name: getattr(options, name)
        for name in ("peers", "hostile", "every", "steps", "batch", "times")
    }
    return found if options.data == "alike" else {**found, "data": options.data}


def cells(options: argparse.Namespace) -> list[tuple[str, str, str, int]]:
    """All runs, those first that say most."""
    pairs = [(method, seed) for seed in options.seeds for method in options.methods]
    clean = [
        (method, "none", screen, seed) for method, seed in pairs for screen in options.defences
    ]
    return clean + [
        (method, attack, screen, seed)
        for attack in options.attacks
        for method, seed in pairs
        for screen in options.defences
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
    trigger = "".join(f", trigger {min(parts):.0%} to {max(parts):.0%}" for parts in _learnt(rows))
    return (
        f"{mean(losses):.3f}{spread} "
        f"({100 * (mean(losses) / mean(plain[row['seed']] for row in rows) - 1):+.1f} %{trigger})"
    )


def _learnt(rows: Sequence[Row]) -> list[list[float]]:
    """How far a backdoor was learnt in each run; an empty list after other attacks."""
    return [[row["learnt"] for row in rows]] if all("learnt" in row for row in rows) else []


def table(found: Sequence[Row]) -> str:
    """Markdown: a line for each method and attack, loss and the distance to the plain mean without
    attackers.
    """
    shown = [screen for screen in DEFENCES if any(row["defence"] == screen for row in found)]
    heads = ("method", "attack", *shown, "refused: hostile, honest", "seeds")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for method in dict.fromkeys(row["method"] for row in found):
        mine = [row for row in found if row["method"] == method]
        plain = {
            row["seed"]: row["loss"]
            for row in mine
            if row["attack"] == "none" and row["defence"] == "undefended"
        }
        for attack in dict.fromkeys(row["attack"] for row in mine):
            rows = [
                [row for row in mine if row["attack"] == attack and row["defence"] == screen]
                for screen in shown
            ]
            losses = [_cell(some, plain) for some in rows]
            refused = [
                sum(row[who] for row in rows[-1]) for who in ("refused_hostile", "refused_honest")
            ]
            seeds = len({row["seed"] for some in rows for row in some})
            lines.append(
                f"| {method} | {attack} | {' | '.join(losses)} | {refused[0]}, {refused[1]} | "
                f"{seeds} |"
            )
    return "\n".join(lines) + "\n"


def harms(found: Sequence[Row]) -> list[Row]:
    """How much higher the loss is than without attackers and defence, as a part, for each method,
    attack and defence.

    None where a run diverged, or where no plain run has its seed.
    """
    plain = {
        (row["method"], row["seed"]): row["loss"]
        for row in found
        if (row["attack"], row["defence"]) == ("none", "undefended")
    }
    cells: dict[tuple[str, str, str], list[Row]] = {}
    for row in found:
        cells.setdefault((row["method"], row["attack"], row["defence"]), []).append(row)
    harms = []
    for (method, attack, screen), rows in cells.items():
        losses = [row["loss"] for row in rows if row["loss"] is not None]
        before = [value for row in rows if (value := plain.get((method, row["seed"]))) is not None]
        harm = mean(losses) / mean(before) - 1 if len(losses) == len(before) == len(rows) else None
        trigger = {"learnt": mean(parts[0])} if (parts := _learnt(rows)) else {}
        harms.append(
            {
                "method": method,
                "attack": attack,
                "defence": screen,
                "harm": harm,
                "seeds": len(rows),
                **trigger,
            }
        )
    return harms


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--attacks", nargs="*", choices=list(ATTACKS), default=list(ATTACKS))
    parser.add_argument("--defences", nargs="+", choices=DEFENCES, default=["undefended", "public"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--hostile", type=int, default=2)
    parser.add_argument("--steps", type=int, default=150, help="inner steps of each peer")
    parser.add_argument("--every", type=int, default=10, help="inner steps in a round")
    parser.add_argument(
        "--batch", type=int, default=4, help="windows of 64 bytes in a step of a peer"
    )
    parser.add_argument(
        "--data",
        choices=list(MARKS),
        default="alike",
        help="what the peers read, against each other",
    )
    parser.add_argument(
        "--times", type=float, default=1.0, help="radius of the robust rule, in median distances"
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FILE",
        help="a line for each run; those that are there are not run again",
    )
    parser.add_argument(
        "--into", type=Path, metavar="PAGE", help="write the table between two comments of a page"
    )
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--json", action="store_true", help="print the runs as one JSON object")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """The program."""
    options = _options(arguments)
    there = (
        options.resume.read_text(encoding="utf-8").splitlines()
        if options.resume and options.resume.exists()
        else []
    )
    found = [row for row in map(json.loads, there) if row["setting"] == setting(options)]
    done = {(row["method"], row["attack"], row["defence"], row["seed"]) for row in found}
    for cell in () if options.report else cells(options):
        if cell in done:
            continue
        row = run(*cell, options)
        found.append(row)
        print(
            f"{' / '.join(map(str, cell))}: loss {row['loss']}, {row['seconds']} s", file=sys.stderr
        )
        if options.resume is not None:
            with options.resume.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    if options.into is not None:
        put_into(options.into, table(found), *MARKS[options.data])
    print(
        json.dumps({"setting": setting(options), "rows": harms(found), "runs": found})
        if options.json
        else table(found)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
