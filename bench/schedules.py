"""Schedules of the outer rate, the outer momentum and the length of a round: what each brings at
equal tokens and equal bytes.

    python bench/schedules.py --data FOLDER --resume bench/results/schedules.jsonl

Text, model and methods are those of bench/table.py, Muon inside, 4 peers, as many exchanges as in
rounds of 50 steps; ``TRIED`` has the runs. With p the part of the rounds that is over (0 in the
first, 1 in the last):

    even               nothing changes: a run of bench/table.py
    lr-line:A:B        the outer rate goes in a line from A to B times its value
    momentum-line:A:B  the outer momentum goes in a line from A to B times its value
    to-mean            the outer rate goes in a line to 1 and the momentum to 0: the last mean is
                       taken as it is
    restarts:S         the momentum's buffer is set to 0 after every S rounds (2605.28585)
    qsr:E              a round is max(E, (a / inner rate)^2) steps (2310.14423); with the least a,
                       as many rounds as "even"
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run as a file, its own folder stands there

from bench._table.methods import TUNED_EVERY, TUNED_PEERS
from bench._table.text import TableText, TextError, corpus
from bench._table.train import SIZES, Place, Spec, Steer, run
from bench.quality import Runner, number
from shoal.optim import OuterOptimizer
from shoal.optim.schedule.schedules import Apply, Send

RESULTS = Path(__file__).resolve().parent / "results" / "schedules.jsonl"
MODEL, LR = "tiny", 0.04
TRIED = {
    ("diloco", 0.7, 0.6): (
        "even",
        "qsr:25",
        "to-mean",
        "momentum-line:0:1.5",
        "lr-line:1:0.5",
        "lr-line:0.5:1",
    ),
    ("diloco", 0.7, 0.9): ("even", "restarts:5"),
    ("noloco-overlap", 1.0, 0.3): ("even", "qsr:25"),
}
"""By method, outer rate and outer momentum: what bench/table.py chose for both methods, and a
momentum that it did not choose.
"""


@dataclass(frozen=True)
class Steered(Spec):
    """A run of the table with a schedule."""

    schedule: str = "even"


@dataclass(frozen=True)
class Uneven:
    """Rounds that end after the inner steps ``ends``; fragments evenly apart in each, applied
    ``lag`` steps after they are sent.
    """

    every: int
    ends: tuple[int, ...]
    fragments: int
    lag: int

    def at(self, step: int) -> list[Send | Apply]:
        sent = _sent(self.ends, self.fragments)
        sends, applies = sent.get(step), sent.get(step - self.lag)
        return ([] if sends is None else [Send(sends)]) + (
            [] if applies is None else [Apply(applies, self.lag)]
        )


@lru_cache
def _sent(ends: tuple[int, ...], fragments: int) -> dict[int, int]:
    rounds = zip((0, *ends[:-1]), ends, strict=True)
    return {
        start + (f + 1) * (end - start) // fragments: f
        for start, end in rounds
        for f in range(fragments)
    }


def inner_rates(task: TableText, steps: int) -> list[float]:
    """The inner rate at each step, as a part of its peak; its warm-up counts as the peak."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler, found = task.lr_scheduler(optimizer, steps), list[float]()
    for _ in range(steps):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    peak = found.index(max(found))
    return [found[peak]] * peak + found[peak:]


def quadratic(rates: Sequence[float], least: int, a: float) -> tuple[int, ...]:
    """Ends of rounds of max(least, (a / rate)^2) steps, by the rate of its first step; a rest below
    ``least`` joins the last.
    """
    ends, at = list[int](), 0
    while at < len(rates):
        length = max(least, math.floor((a / rates[at]) ** 2))
        at = at + length if at + length + least <= len(rates) else len(rates)
        ends.append(at)
    return tuple(ends)


def qsr(rates: Sequence[float], rounds: int, least: int) -> tuple[int, ...]:
    """The ends of so many rounds. ValueError if no ``a`` makes them."""
    for hundredths in range(100, 100 * math.ceil(len(rates) ** 0.5)):
        if len(found := quadratic(rates, least, hundredths / 100)) == rounds:
            return found
    raise ValueError(f"no a makes {rounds} rounds of at least {least} steps out of {len(rates)}")


def factors(schedule: str, p: float, lr: float) -> tuple[float, float]:
    """What the outer rate ``lr`` and the outer momentum are multiplied by."""
    kind, *numbers = schedule.split(":")
    if kind == "to-mean":
        return 1 + p * (1 / lr - 1), 1 - p
    if kind in ("lr-line", "momentum-line"):
        start, end = map(float, numbers)
        value = start + p * (end - start)
        return (value, 1.0) if kind == "lr-line" else (1.0, value)
    return 1.0, 1.0


def steering(spec: Steered, place: Place) -> Steer:
    """What a run does before each step."""
    made, rounds = dict(spec.outer), spec.steps // spec.every
    kind, *numbers = spec.schedule.split(":")
    ends = (
        qsr(inner_rates(place.task(spec), spec.steps), rounds, int(numbers[0]))
        if kind == "qsr"
        else ()
    )

    def steer(optimizer: OuterOptimizer, step: int) -> None:
        if ends and step == 1:
            even: Any = optimizer.schedule
            optimizer.schedule = Uneven(
                even.every, ends, getattr(even, "fragments", 1), getattr(even, "lag", 0)
            )
        done, rest = divmod(step - 1, spec.every)
        if rest:
            return
        of_lr, of_momentum = factors(spec.schedule, done / (rounds - 1), made["lr"])
        for group in optimizer.outer.param_groups:
            group.update(lr=made["lr"] * of_lr, momentum=made["momentum"] * of_momentum)
        if kind == "restarts" and done and done % int(numbers[0]) == 0:
            for buffer in optimizer.rule_state["momentum"]:
                buffer.zero_()

    return steer


def steered(spec: Steered, place: Place) -> dict[str, Any]:
    """The result of a run."""
    return run(spec, place, steering(spec, place))


def specs(text: str, steps: int, seeds: int) -> Iterator[Steered]:
    """All runs, seed by seed."""
    for seed in range(seeds):
        for (method, lr, momentum), schedules in TRIED.items():
            place = (text, MODEL, method, "muon", "float32", TUNED_PEERS, TUNED_EVERY, steps, LR)
            for schedule in schedules:
                yield Steered(*place, (("lr", lr), ("momentum", momentum)), seed, schedule)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", help="text files, as for bench/table.py"
    )
    parser.add_argument("--steps", type=number, default=1000)
    parser.add_argument("--seeds", type=number, default=1)
    parser.add_argument(
        "--resume",
        type=Path,
        default=RESULTS,
        metavar="FILE",
        help="JSON lines of results; default: %(default)s",
    )
    options = parser.parse_args()
    cache = options.resume.parent / "table_text"
    try:
        text = corpus(options.data, SIZES[MODEL].vocabulary, cache)
    except TextError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    runner = Runner(options.resume, 1, math.inf, Steered, partial(steered, place=Place(cache)))
    for spec in specs(text.digest, options.steps, options.seeds):
        runner([spec])
    return 0


if __name__ == "__main__":
    sys.exit(main())
