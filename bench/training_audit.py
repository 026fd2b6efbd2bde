"""What an audit of training rounds tells apart: honest stretches of five inner steps, and ten ways of not doing them.

    python bench/training_audit.py --claims 50 --calibrate 50 --json

A small byte-level GPT is trained on its own text; stretches of the run are claimed, by honest peers that compute with other threads
and kernels, and by cheats; an auditor replays them. Each pair of dtypes (of the steps, by autocast; weights are float32) is
calibrated on another run. "honest" is the rate of false alarms, with its 95 % interval; the other rows are rates of detection.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

if not __package__:  # run as a file: its folder comes first on the path, where bench/verification.py hides the package
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench._interval import rate_interval
from bench._training_cheats import LABEL, OTHER, SHARD, World
from shoal.node.task import Shard
from shoal.node.verify.training.audit import Kept, prove
from shoal.node.verify.training.calibrate import OTHERS, half, honest_evidence
from shoal.node.verify.training.checker import TrainingChecker
from shoal.node.verify.training.replica import Condition
from shoal.verification.calibration.calibration import Calibration, Pair
from shoal.verification.fingerprints import WeightProjection

SIDES = (("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"))
CALIBRATED = Shard(2, 4, 1)


def alike(dtype: str) -> tuple[Condition, ...]:
    """Ways in which honest peers may compute in ``dtype``."""
    if dtype == "float32":
        return OTHERS

    @contextmanager
    def both(other: Condition) -> Iterator[None]:
        with other(), half():
            yield

    return tuple(partial(both, other) for other in OTHERS)


def measure(world: World, sides: tuple[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """Rates for one pair of dtypes."""
    prover, verifier = sides
    condition: Condition = nullcontext if prover == "float32" else half
    own: Condition = nullcontext if verifier == "float32" else half
    pair, calibration = Pair(WeightProjection.name, LABEL, prover, verifier), Calibration()
    kept = world.honest(CALIBRATED, options.calibrate)
    calibration.add(pair, honest_evidence(kept, world.replica, world.terms, alike(prover), own))
    checker = TrainingChecker(
        world.replica, world.terms, calibration, label=LABEL, dtype=verifier, condition=own, rate=options.rate
    )
    claimed = list(world.honest(SHARD, options.claims))
    spent: list[float] = []

    def refused(made: Callable[[Kept], Kept]) -> int:
        found = 0
        for number, one in enumerate(claimed):
            proven = prove(made(one), world.terms, run="bench", round=number, peer="prover", slot=0, dtype=prover)
            finding = checker.check(proven.claim, proven.material, proven.snapshot, SHARD)
            spent.append(finding.seconds)
            found += not finding.accepted
        return found

    ways = alike(prover)
    alarms = refused(lambda one: world.done(one, ways[one.stretch.first // world.terms.steps % len(ways)]))
    detection = {}
    others = list(world.honest(OTHER, options.claims))
    for name, cheat in world.cheats(cycle(others), condition).items():  # each goes through all of them, so they stay in step
        detection[name] = refused(cheat) / len(claimed)
    largest = [max(column) for column in zip(*(claim.means() for claim in calibration.pairs[pair].claims), strict=True)]
    return {
        "honest_false_positive_rate": alarms / len(claimed),
        "interval": rate_interval(alarms, len(claimed)),
        "detection": detection,
        "honest_largest": dict(zip(("turned", "longer"), largest, strict=True)),
        "check_s": sorted(spent)[len(spent) // 2],
        "warning": calibration.pairs[pair].warning(options.rate),
    }


def main() -> None:
    """Print a table, or one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--claims", type=int, default=50, help="fresh claims in each row")
    parser.add_argument("--calibrate", type=int, default=50, help="honest claims to calibrate with, at least 20")
    parser.add_argument("--rate", type=float, default=1e-4, help="of false alarms, as stated to the test")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    for name, low, high in (("claims", 1, 10_000), ("calibrate", 20, 10_000), ("rate", 1e-9, 0.5)):
        if not low <= getattr(options, name) <= high:
            parser.error(f"--{name} must be from {low} to {high}, not {getattr(options, name)}")
    torch.set_num_threads(1)
    began = time.perf_counter()
    # One stretch in sixteen is lost to the outer step.
    world = World(steps=5 * (max(options.claims, options.calibrate) * 16 // 15 + 16))
    kept = next(islice(world.honest(), 1, None))
    proven = prove(kept, world.terms, run="bench", round=0, peer="prover", slot=0)
    pairs = {}
    for sides in SIDES:
        row = pairs[" -> ".join(sides)] = measure(world, sides, options)
        low, high = row["interval"]
        largest = row["honest_largest"]
        print(
            f"{' -> '.join(sides)}: honest {row['honest_false_positive_rate']:.1%} ({low:.1%} to {high:.1%}), turned by at most "
            f"{largest['turned']:.1e}, longer by at most {largest['longer']:.1e}",
            file=sys.stderr,
        )
        for name, rate in row["detection"].items():
            print(f"    {name:<26} {rate:6.1%}", file=sys.stderr, flush=True)
    print(row["warning"], file=sys.stderr)
    how = {name: getattr(options, name) for name in ("claims", "calibrate", "rate")}
    sizes = {"material_bytes": len(proven.material), "snapshot_bytes": len(proven.snapshot)}
    print("  ".join(f"{name} {value:,}" for name, value in sizes.items()), file=sys.stderr)
    if options.json:
        machine = {"python": platform.python_version(), "torch": torch.__version__, "seconds": time.perf_counter() - began}
        print(json.dumps({"task": LABEL, **how, **machine, **sizes, "pairs": pairs}))


if __name__ == "__main__":
    main()
