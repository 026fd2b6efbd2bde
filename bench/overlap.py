"""How much of its time a node computes when the network is slow:
`python bench/overlap.py --mbit 100 --delay 0,50,200`.

Real processes, one per node, behind links of --mbit each way and --delay milliseconds one way (a
round trip takes twice that), train the same model by one method after the other:

    alone               no exchange: what the machine itself costs the loop
    ddp                 DistributedDataParallel over gloo, gradients every step
    torchft             torchft's DiLoCo over gloo
    torchft-streaming   the same in fragments, overlapped as far as it goes
    hivemind            hivemind.Optimizer(use_local_updates=True), which averages in the background
    noloco, streaming   ours, overlapped: in fragments, with one partner or over everyone, with the
                        lag that each node finds
    co2                 ours, overlapped: a whole round late
    noloco-blocking     ours, all at once every round, waited for: with one partner
    diloco              the same over everyone

Computing is simulated: an inner step, its optimizer included, is a timed wait, as on a machine
whose GPU computes while its processor is idle (only DDP, which sends them, makes real gradients).
utilisation = computing / wall time = 1 - wait / wall, where *all* that is not computing counts as
waiting: transfers, finding each other, encryption, copies, the outer step. All have their defaults:
ours find their lag, and torchft has the longest that it can have; --lag sets it for ours. --warm
rounds come before those that are measured, for all methods alike, so that connections are there and
lags are found; what is still in flight at the end is in flight at the beginning, too. The lag is
that of the last six rounds: --warm 6 leaves out the first exchanges, which dial. As root the links
are network namespaces with `tc tbf` and a wire in user space for the delay; else relays, which only
programs that can announce an address can use: the others are skipped.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import signal
import sys
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # called by its path, Python looks only beside this file

from bench._link import Link, LinkError, Namespaces
from bench._link_check import check
from bench._overlap_methods import KINDS, Setup
from bench._overlap_report import records, tables
from bench._page import put_into
from bench._relay import Relays
from bench.exchange import BenchError, Process
from shoal.optim import codec_named

NEEDS = {"torchft": "torchft", "torchft-streaming": "torchft", "hivemind": "hivemind"}
ANNOUNCES = {
    "alone",
    "hivemind",
    "noloco",
    "noloco-blocking",
    "diloco",
    "streaming",
    "co2",
}  # can be told an address other than the own
WIDTH = 1000  # of a layer: a million parameters
BEGIN, END = "<!-- overlap: begin -->\n", "<!-- overlap: end -->"
SPARE_S = 90.0  # seconds beyond what a method should take, before it is given up


@dataclass(frozen=True)
class Plan:
    """What is measured, the same for every method."""

    nodes: int
    mbit: float
    layers: int
    every: int
    step_s: float
    rounds: int
    warm: int
    fragments: int
    lag: int | None
    """Of ours, if it is set."""
    codec: str | None = None
    """Of ours, if it is set."""
    slow: int = 1
    """How many times as long as the others' the last node's steps take."""

    @property
    def model_bytes(self) -> int:
        return self.layers * WIDTH * WIDTH * 4

    def sync_s(self) -> float:
        """The least that an exchange of the whole model takes."""
        return self.model_bytes * 8 / (self.mbit * 1e6)

    def times_slower(self, rank: int) -> int:
        """How many times as long as the first node's the steps of a node take."""
        return self.slow if rank == self.nodes - 1 else 1

    def steps(self, method: str) -> tuple[int, int]:
        """Inner steps to warm up and to measure: whole rounds; for DDP about the same time, if it
        waits at every step.
        """
        if method != "ddp":
            return self.every * self.warm, self.every * self.rounds
        most = self.every * self.rounds
        return 2, min(max(round(most * self.step_s / (self.step_s + self.sync_s())), 5), most)


def missing(method: str, link: Link) -> str | None:
    """Why the method cannot be measured here."""
    package = NEEDS.get(method)
    if package is not None and importlib.util.find_spec(package) is None:
        return f"{package} is not installed (pip install -e '.[bench]')"
    if method not in ANNOUNCES and link.announced(0) is not None:
        return "it cannot announce the address of a relay: run as root, for network namespaces"
    return None


def measure(method: str, link: Link, plan: Plan) -> dict[str, Any]:
    """One row: all nodes of one method, from their start to their end."""
    warm, steps = plan.steps(method)
    patience = SPARE_S + 3 * max(plan.rounds, plan.warm) * (
        plan.every * plan.step_s + plan.sync_s()
    )
    limit = str(3 * patience)
    ends: list[Process] = []
    addresses: list[dict[str, Any]] = []
    try:
        for rank in range(plan.nodes):
            setup = Setup(
                method,
                rank,
                plan.nodes,
                link.ip(rank),
                link.port(rank),
                link.announced(rank),
                plan.step_s * plan.times_slower(rank),
                plan.every,
                plan.layers,
                WIDTH,
                plan.fragments,
                plan.lag,
                plan.codec,
                addresses,
            )
            command = [
                sys.executable,
                "-m",
                "bench._overlap_node",
                json.dumps(asdict(setup)),
                limit,
            ]
            ends.append(Process(method, rank, [*link.enter(rank), *scheduled(method), *command]))
            addresses.append(ends[-1].answer(SPARE_S)["address"])

        def all_do(**order: Any) -> list[dict[str, Any]]:
            for end in ends:
                end.tell(**order)
            return [end.answer(patience) for end in ends]

        def all_run(steps: int) -> list[dict[str, Any]]:
            for rank, end in enumerate(ends):
                end.tell(do="run", steps=steps // plan.times_slower(rank))
            return [end.answer(patience) for end in ends]

        all_do(do="meet", all=addresses)
        all_run(warm)
        before = link.sent()
        windows = all_run(steps)
        sent = [after - since for after, since in zip(link.sent(), before, strict=True)]
    finally:
        for end in ends:
            end.close()
    return row(method, windows, sent, steps)


def scheduled(method: str) -> list[str]:
    """What to put before a command so that it is scheduled as its method bears it.

    Hivemind's daemons spin as they start. Under `chrt -f` nothing else would run on their cores,
    and no node would ever answer: so its processes come before all others by nice, and not by a
    real-time policy.
    """
    if method != "hivemind" or os.sched_getscheduler(0) == os.SCHED_OTHER:
        return []
    return ["chrt", "-o", "0", "nice", "-n", "-20"]


def row(method: str, windows: list[dict[str, Any]], sent: list[int], steps: int) -> dict[str, Any]:
    """The mean over the nodes of what they measured; ``least`` is that of the worst node.

    ``nobody`` is the part of all exchanges that found no partner, None for methods that do not say.
    """

    def mean(name: str) -> float:
        return float(sum(window[name] for window in windows) / len(windows))

    wall, busy = mean("wall_s"), mean("busy_s")
    alone = [window["alone"] for window in windows if window["alone"] is not None]
    met = sum(window["rounds"] for window in windows)
    return {
        "method": method,
        "steps": steps,
        "rounds": min(window["rounds"] for window in windows),
        "wall_s": round(wall, 2),
        "wait_s": round(wall - busy, 2),
        "blocked_s": round(mean("waited_s"), 2) if windows[0]["waited_s"] is not None else None,
        "utilisation": round(busy / wall, 4),
        "least": round(min(window["busy_s"] / window["wall_s"] for window in windows), 4),
        "nobody": round(sum(alone) / max(met + sum(alone), 1), 4) if alone else None,
        "sent_mb": round(sum(sent) / len(sent) / 1e6, 1),
        "lag": max(
            (window["lag"] for window in windows if window["lag"] is not None), default=None
        ),
    }


def with_delay(delay: int, methods: list[str], plan: Plan, kind: str, note: Any) -> dict[str, Any]:
    """All methods at one delay, in milliseconds one way."""
    link = make_link(kind, plan.nodes, plan.mbit, delay, note)
    try:
        ruler = check(link, plan.mbit * 1e6 / 8, delay / 1000)
        found: dict[str, Any] = {
            "delay_ms": delay,
            "link": link.kind,
            "check": ruler,
            "rows": [],
            "skipped": {},
        }
        for method in methods:
            why = missing(method, link)
            if why is None:
                try:
                    found["rows"].append(measure(method, link, plan))
                    note(f"delay {delay} ms: {found['rows'][-1]}")
                    continue
                except BenchError as error:
                    why = f"failed: {error}"
            found["skipped"][method] = why
            note(f"delay {delay} ms: {method} skipped: {why}")
        return found
    finally:
        link.close()


def make_link(kind: str, nodes: int, mbit: float, delay: int, note: Any) -> Link:
    rate, seconds = mbit * 1e6 / 8, delay / 1000
    if kind != "relay":
        try:
            return Namespaces(nodes, rate, seconds)
        except LinkError as error:
            if kind == "namespaces":
                raise BenchError(f"{error}: choose --link relay.") from None
            note(f"{error}; relays instead")
    try:
        return Relays(nodes, rate, seconds)
    except LinkError as error:
        raise BenchError(f"{error}.") from None


def flat(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The figure of each method at each delay."""
    return [
        {"method": row["method"], "delay_ms": at["delay_ms"], "utilisation": row["utilisation"]}
        for at in found
        for row in at["rows"]
    ]


def show(found: list[dict[str, Any]], plan: Plan) -> None:
    console = Console(stderr=True, width=132)
    for at in found:
        probe = at["check"]
        table = Table(
            "method",
            "rounds",
            "steps",
            "wall s",
            "wait s",
            "blocked s",
            "utilisation",
            "worst node",
            "found nobody",
            "MB sent per node",
            "lag",
            title=f"{plan.nodes} nodes, {plan.mbit:g} Mbit/s (found {probe['mbit']:.1f}), "
            f"{at['delay_ms']} ms one way (found "
            f"{probe['delay_ms']:.1f}), {at['link']}; {plan.model_bytes / 1e6:g} MB model, "
            f"{plan.every} steps of "
            f"{plan.step_s * 1000:g} ms a round, simulated by timed waits",
        )
        for row in at["rows"]:
            names = (
                "rounds",
                "steps",
                "wall_s",
                "wait_s",
                "blocked_s",
                "utilisation",
                "least",
                "nobody",
                "sent_mb",
                "lag",
            )
            table.add_row(
                row["method"], *("-" if row[name] is None else f"{row[name]:g}" for name in names)
            )
        console.print(table)
        for method, why in at["skipped"].items():
            console.print(f"{method}: skipped, {why}")


def arguments() -> argparse.Namespace:
    def delays(text: str) -> list[int]:
        values = [int(part) for part in text.split(",")]
        if not all(0 <= value <= 2000 for value in values):
            raise argparse.ArgumentTypeError("delays are whole milliseconds from 0 to 2000")
        return values

    def methods(text: str) -> list[str]:
        names = [part for part in text.split(",") if part]
        if not names or not set(names) <= set(KINDS):
            raise argparse.ArgumentTypeError(f"choose among {', '.join(KINDS)}")
        return list(dict.fromkeys(names))

    def positive(text: str) -> float:
        if not 0 < float(text) < 1e6:
            raise argparse.ArgumentTypeError("must be positive")
        return float(text)

    def count(text: str) -> int:
        if not 1 <= int(text) <= 10_000:
            raise argparse.ArgumentTypeError("must be from 1 to 10000")
        return int(text)

    parser = argparse.ArgumentParser(
        description="Measure how much of its time a node computes behind a slow link."
    )
    parser.add_argument("--mbit", type=positive, default=100.0, help="rate of every link, each way")
    parser.add_argument(
        "--delay",
        type=delays,
        default=[0, 50, 200],
        help="milliseconds one way, separated by commas",
    )
    parser.add_argument("--methods", type=methods, default=list(KINDS), help="separated by commas")
    parser.add_argument("--nodes", type=count, default=2)
    parser.add_argument(
        "--layers", type=count, default=10, help="of a million float32 parameters each"
    )
    parser.add_argument("--every", type=count, default=100, help="inner steps of a round")
    parser.add_argument(
        "--step", type=positive, default=100.0, help="milliseconds of an inner step"
    )
    parser.add_argument("--rounds", type=count, default=3, help="rounds that are measured")
    parser.add_argument(
        "--warm", type=count, default=2, help="rounds before those, which are not measured"
    )
    parser.add_argument("--fragments", type=count, default=4, help="of the streaming methods")
    parser.add_argument(
        "--lag",
        type=count,
        help="inner steps that a fragment of ours may take; else each node finds its own",
    )
    parser.add_argument("--codec", help="of ours, as in `shoal up --codec`; else each method's own")
    parser.add_argument(
        "--slow",
        type=count,
        default=1,
        help="the last node's steps take so many times as long, and it makes as many fewer",
    )
    parser.add_argument("--link", choices=("auto", "namespaces", "relay"), default="auto")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="measure nothing: tables of the last run in such a file",
    )
    parser.add_argument(
        "--into",
        type=Path,
        metavar="PAGE",
        help="with --report: write them between two comments of a page",
    )
    options = parser.parse_args()
    if options.nodes < 2:
        parser.error("argument --nodes: at least 2 are needed")
    if options.fragments > min(options.layers, options.every) or (
        options.lag is not None and options.lag >= options.every
    ):
        parser.error(
            "argument --fragments: at most as many as layers and steps of a round; --lag: less "
            "than those steps"
        )
    if options.codec is not None:
        try:
            codec_named(options.codec)
        except ValueError as error:
            parser.error(f"argument --codec: {error}")
    return options


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("torch", "torchft", "hivemind"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def main() -> int:
    options = arguments()
    if options.report is not None:
        shown = tables(records(options.report)[-1])
        if options.into is None:
            print(shown)
        else:
            put_into(options.into, f"{shown}\n", BEGIN, END)
        return 0
    plan = Plan(
        options.nodes,
        options.mbit,
        options.layers,
        options.every,
        options.step / 1000,
        options.rounds,
        options.warm,
        options.fragments,
        options.lag,
        options.codec,
        options.slow,
    )

    def end(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not stop the cleaning up
        sys.exit(143)

    signal.signal(signal.SIGTERM, end)
    began = time.monotonic()

    def note(text: str) -> None:
        print(f"bench: {text}", file=sys.stderr, flush=True)

    try:
        found = [
            with_delay(delay, options.methods, plan, options.link, note) for delay in options.delay
        ]
    except BenchError as error:
        note(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    show(found, plan)
    if options.json:
        machine = {"cores": len(os.sched_getaffinity(0)), **versions()}
        plan_json = {**asdict(plan), "model_bytes": plan.model_bytes}
        report = {
            "bench": "overlap",
            "date": time.strftime("%Y-%m-%d"),
            "plan": plan_json,
            "rows": flat(found),
            "delays": found,
            "machine": machine,
        }
        print(json.dumps({**report, "took": round(time.monotonic() - began, 1)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
