"""Pairs or groups: held-out loss and bytes of what a swarm may do without a `--method`, at 3 to 16
peers, on data that are alike and on a text of its own for each peer.

    python bench/default.py --minutes 100
    python bench/default.py --peers 4,8 --data unlike --seeds 2 --json

Text, model ("mini", or "1m") and training are those of bench/table.py, Muon inside, each method at
the inner rate that it chose there. What it has run already is not run again. All rows of one model
have seen equally many tokens. "alike": the pieces of the text are dealt in turn, as in
bench/table.py. "unlike": in the order of their names (a dictionary, manuals of Python by folder,
sayings) the text is cut into as many parts of equal size as there are peers. What is held out is
the same. "uneven": alike, but the peers make 1, 1, 2 and 4 steps in the same time, rounds last as
long for all, so that nobody waits, and each peer's tokens are its weight in the mean; all together
make as many steps.

The columns are those of bench/table.py; "DDP" is all-reduce at every step of four peers, on the
same data; beside it stands all-reduce with AdamW where bench/table.py has run it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run as a file, its own folder stands there

from bench._table.methods import BACK, ONE_BIT
from bench._table.results import HEADS, cells, rows
from bench._table.text import TextError, corpus
from bench._table.train import ADAMW, SIZES, UNEVEN, UNLIKE, Place, Spec, run
from bench.quality import Runner, TimeUp, number, numbers
from shoal.node.plan.advice import AVERAGED_BACK, LR_OF_SEVERAL

RESULTS = Path(__file__).resolve().parent / "results" / "default.jsonl"
TABLE = RESULTS.with_name("table.jsonl")
PEERS = (4, 8, 3, 16)
BASE_PEERS = 4
"""Of all-reduce, whose loss does not follow from their number."""
DATA = ("alike", UNLIKE, UNEVEN)
STEERED = (("lr", 1.0), ("momentum", 0.3))
STEERED_SEVERAL = (("lr", LR_OF_SEVERAL), ("momentum", 0.3))
"""From ``AVERAGED_BACK`` peers on, with averages back in 4 bits: the default."""


class Row(NamedTuple):
    """What a swarm may do."""

    method: str
    codec: str
    every: int
    lr: float
    outer: tuple[tuple[str, float | bool], ...] = STEERED


ALL_REDUCE = Row("ddp", "float32", 1, 0.04, (("beta2", 0.95),))
ROWS = (
    Row("noloco-overlap", "mod4", 25, 0.02),
    *(Row("streaming", codec, 16, 0.02) for codec in (ONE_BIT, BACK[2], BACK[0])),
)


def spec(row: Row, text: str, model: str, peers: int, steps: int, seed: int, adamw: float) -> Spec:
    setting = row.outer if adamw == 1 else (*row.outer, (ADAMW, adamw))
    return Spec(
        text,
        model,
        row.method,
        "muon",
        row.codec,
        peers,
        row.every,
        steps,
        row.lr,
        setting,
        seed,
    )


def specs(
    text: str,
    size: str,
    peers: Sequence[int],
    data: Sequence[str],
    steps: int,
    seeds: int,
    adamw: float = 1.0,
) -> Iterator[Spec]:
    """All runs, those first on which the others' distances depend."""
    for seed in range(seeds):
        for kind in data:
            model = size if kind == "alike" else f"{size}-{kind}"
            yield spec(ALL_REDUCE, text, model, BASE_PEERS, steps, seed, adamw)
            for count in peers:
                for row in ROWS:
                    if count >= AVERAGED_BACK and row.codec == BACK[2]:
                        row = row._replace(outer=STEERED_SEVERAL)
                    if kind == UNEVEN:  # the slow ones make half as many steps
                        row = row._replace(every=row.every // 2 * 2)
                    yield spec(row, text, model, count, steps, seed, adamw)


def shown_of(results: Mapping[str, dict[str, Any]], wanted: Sequence[Spec]) -> list[dict[str, Any]]:
    """Return the results of ``wanted``, and all-reduce's with any optimizer on the same runs."""
    keys = {one.key for one in wanted}
    runs = {(one.text, one.model, one.steps) for one in wanted}
    found = []
    for key, one in results.items():
        is_base = one["method"] == "ddp" and (one["text"], one["model"], one["steps"]) in runs
        if key in keys or is_base:
            found.append(one)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, metavar="FOLDER", help="as for bench/table.py --data")
    parser.add_argument("--model", choices=("micro", "mini", "1m"), default="mini")
    parser.add_argument("--steps", type=number, help="of each peer; default: the model's")
    parser.add_argument("--peers", type=numbers, default=list(PEERS), help="separated by commas")
    parser.add_argument("--data", choices=DATA, action="append", help="default: all")
    parser.add_argument("--seeds", type=number, default=1)
    parser.add_argument(
        "--adamw", type=float, default=1.0, help="AdamW's rate over Muon's; default: 1"
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after")
    parser.add_argument("--resume", type=Path, default=RESULTS, metavar="FILE", help="results")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    cache, size = options.resume.parent / "table_text", SIZES[options.model]
    try:
        text = corpus(options.text, size.vocabulary, cache)
    except TextError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    runner = Runner(options.resume, 1, until, Spec, partial(run, place=Place(cache)))
    runner.take(TABLE.read_text(encoding="utf-8").splitlines())
    wanted = list(
        specs(
            text.digest,
            options.model,
            options.peers,
            options.data or DATA,
            options.steps or size.steps,
            options.seeds,
            options.adamw,
        )
    )
    complete = False
    try:
        runner(wanted)
        complete = True
    except TimeUp:
        print("bench: the time is up; the same command goes on with what is left.", file=sys.stderr)
    found = rows(shown_of(runner.results, wanted))
    for model in dict.fromkeys(row["model"] for row in found):
        shown = Table(*HEADS, title=model)
        for row in found:
            if row["model"] == model:
                shown.add_row(*cells(row))
        Console(stderr=True, width=160).print(shown)
    if options.json:
        print(json.dumps({"rows": found, "complete": complete}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
