"""Loss where exchanges are agreed by calls, against rounds of pairs, at equal tokens and bytes.

    python bench/calls.py --data FOLDER --minutes 60        # goes on where it was stopped
    python bench/calls.py --report bench/results/calls.jsonl
    python bench/calls.py --counts          # no model: who finds whom, and how far peers are apart

The model is "mini" of bench/table.py, trained by NoLoCo as a swarm does by default (Muon inside,
`mod4`, rounds of 25 steps, four fragments), by the product's optimizer, rule and codec. Who meets
whom, and when, is simulated: bench/_calls_protocol.py has the protocol. "calls" is as it was
designed. In "agreed" both peers stage after they have agreed, a turn looks for somebody who is free
for half a round, a peer that sends holds one call until it has sent, two calls are accepted a turn,
and in swarms below 16 the same two may meet again at once.

"link": part of the time that a peer needs its link for its exchanges, of which it has one at a
time. "exchanges": of a fragment, by peer and round; turns are 1.13 rounds apart, or further, so
that they are 1 at most. "alone": turns that found nobody. "busy", "refused": calls that were
answered so, the latter because the two had met lately. "lag": steps from staging to applying.
"loss": the mean of the peers' losses; "averaged": the loss of the mean of their weights, as a last
average leaves them; "difference": to that by rounds, seed by seed. "variance": that of
bench/_calls_walk.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run as a file, its own folder stands there

from bench._calls_protocol import Setting
from bench._calls_train import HOW, Case, run, world_of
from bench._calls_walk import RandomWalk
from bench._table.methods import DEFAULT
from bench._table.text import TextError, corpus
from bench._table.train import SIZES, Place
from bench.quality import Runner, TimeUp, number, numbers

RESULTS = Path(__file__).resolve().parent / "results" / "calls.jsonl"
MODEL = "mini"
LR = 0.02
OUTER = (("lr", 1.0), ("momentum", 0.3))
"""As bench/table.py chose for this row."""
SPEEDS = {"alike": (1.0,), "unlike": (1.0, 1.0, 2.0, 4.0)}
LINKS = (0.3, 0.6)
PEERS = [4, 8, 2, 16, 3, 5]
COUNTED_STEPS = 3000
COUNTS = ("exchanges", "alone", "answered_busy", "answered_refuse", "left_out", "lag", "turn")
LOSSES = ("loss", "averaged")
HEADS = (
    "K", "speeds", "link", "how", "seeds", "loss", "difference", "averaged", "difference",
    *COUNTS, "seconds",
)  # fmt: skip

Row = dict[str, Any]


def cases(text: str, options: argparse.Namespace) -> Iterator[Case]:
    """All runs, those that decide most first."""
    even = [count for count in options.peers if count % 2 == 0]
    odd = [count for count in options.peers if count % 2]
    for speeds in options.speeds:
        for counts in (even, odd):
            for seed in range(options.seeds):
                for busy in options.links:
                    for count in counts:
                        for how in options.how:
                            yield case(text, count, options.steps, seed, how, busy, speeds)


def case(
    text: str,
    peers: int,
    steps: int,
    seed: int,
    how: str,
    busy: float,
    speeds: tuple[float, ...],
) -> Case:
    row = (DEFAULT.method, DEFAULT.inner, DEFAULT.codec, peers, DEFAULT.every)
    return Case(text, MODEL, *row, steps, LR, OUTER, seed, how, busy, speeds)


def table(results: Sequence[Row]) -> str:
    """Return the results as Markdown, a line for each swarm, link and protocol."""
    by_rounds: dict[tuple[Any, ...], Row] = {}
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for result in results:
        place = (result["peers"], tuple(result["speeds"]), result["busy"])
        if result["how"] == "rounds":
            by_rounds[*place, result["seed"]] = result
        groups.setdefault((*place, result["how"]), []).append(result)
    lines = [_line(HEADS), _line(["---"] * len(HEADS))]
    for (peers, speeds, busy, how), found in sorted(groups.items()):
        place = (peers, speeds, busy)
        cells = [peers, _speeds(speeds), f"{busy:.0%}", how, len(found)]
        for name in LOSSES:
            known = [result for result in found if result.get(name) is not None]
            cells.append("")
            if known:
                cells[-1] = f"{mean(result[name] for result in known):.4f}"
            differences = []
            for result in known:
                base = by_rounds.get((*place, result["seed"]), {}).get(name)
                if base and how != "rounds":
                    differences.append(f"{result[name] / base - 1:+.2%}")
            cells.append(" ".join(differences))
        for name in COUNTS:
            cells.append(f"{mean(result[name] for result in found):.3g}")
        cells.append(round(mean(result["seconds"] for result in found)))
        lines.append(_line(cells))
    return "\n".join(lines)


def counts(options: argparse.Namespace) -> str:
    """Return what becomes of calls without any training, as Markdown."""
    heads = ("K", "speeds", "link", "how", "variance", *COUNTS)
    lines = [_line(heads), _line(["---"] * len(heads))]
    for count in sorted(options.peers):
        for speeds in options.speeds:
            for busy in options.links:
                setting = Setting(count, busy, COUNTED_STEPS, speeds)
                for how in options.how:
                    walk = RandomWalk(setting)
                    world = world_of(how, setting, walk)
                    world.run()
                    row = world.counts.row()
                    cells = [f"{row[name]:.3g}" for name in COUNTS]
                    place = [count, _speeds(speeds), f"{busy:.0%}", how, f"{walk.variance:.2f}"]
                    lines.append(_line([*place, *cells]))
    return "\n".join(lines)


def _speeds(speeds: Sequence[float]) -> str:
    return "alike" if len(set(speeds)) == 1 else ":".join(f"{speed:g}" for speed in speeds)


def _line(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _names(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(HOW):
        raise argparse.ArgumentTypeError(f"choose among {', '.join(HOW)}")
    return names


def _kinds(text: str) -> list[tuple[float, ...]]:
    names = text.split(",")
    if not set(names) <= set(SPEEDS):
        raise argparse.ArgumentTypeError(f"choose among {', '.join(SPEEDS)}")
    return [SPEEDS[name] for name in names]


def _links(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if not all(0 < value < 1 for value in values):
        raise argparse.ArgumentTypeError("must be between 0 and 1, separated by commas")
    return values


def _peers(text: str) -> list[int]:
    values = numbers(text)
    if min(values) < 2 or max(values) > SIZES[MODEL].batch:
        raise argparse.ArgumentTypeError(f"must be between 2 and {SIZES[MODEL].batch}")
    return values


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", help="text files, as for bench/table.py"
    )
    parser.add_argument("--peers", type=_peers, default=PEERS, help="separated by commas")
    parser.add_argument("--links", type=_links, default=LINKS, help="separated by commas")
    parser.add_argument("--how", type=_names, default=HOW, help=f"of {', '.join(HOW)}")
    parser.add_argument(
        "--speeds",
        type=_kinds,
        default=list(SPEEDS.values()),
        help=f"of {', '.join(SPEEDS)}",
    )
    parser.add_argument("--steps", type=number, default=800)
    parser.add_argument("--seeds", type=number, default=2)
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin no run after so many"
    )
    parser.add_argument(
        "--resume",
        type=Path,
        default=RESULTS,
        metavar="FILE",
        help="JSON lines of results; default: %(default)s",
    )
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="run nothing: print the table of a file"
    )
    parser.add_argument(
        "--counts", action="store_true", help="train nothing: print what becomes of calls"
    )
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.report is not None:
        print(table(list(Runner(options.report, 1, 0, Case).results.values())))
        return 0
    if options.counts:
        print(counts(options))
        return 0
    cache = options.resume.parent / "table_text"
    try:
        text = corpus(options.data, SIZES[MODEL].vocabulary, cache)
    except TextError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    until = time.monotonic() + 60 * options.minutes
    runner = Runner(options.resume, 1, until, Case, partial(run, place=Place(cache)))
    try:
        for made in cases(text.digest, options):
            runner([made])
    except TimeUp:
        print("bench: the time is up; the same command goes on with what is left.", file=sys.stderr)
    print(table(list(runner.results.values())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
