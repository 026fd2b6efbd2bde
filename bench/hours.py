"""Whether a node of reinforcement learning stays as it is for hours: its resident memory, open
files and threads, each minute.

    nice -n 10 python bench/hours.py --minutes 120 --resume FILE --json

Two real nodes on this machine share rollouts and learn from them (`shoal up --task rl`), with the
policies --policies. Each minute is a line of FILE for each node, as soon as it is measured, so that
a run that is cut off keeps what it has; with a FILE that has a whole run nothing is run again, and
with --report it is summed up as far as it went. "grown" is the memory at the end by that after
--settled minutes, less 1; "daemon_mb" is that of the node's libp2p daemon.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: the folder above is not on the path then
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.memory import Process, process_sizes

MINUTE_S = 60.0
NODES = ("first", "second")
WINDOW = 3  # measurements, whose median is the memory at a time


def children(pid: int) -> Iterator[int]:
    """Yield the processes that ``pid`` started, and those that they started."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            started = path.read_text(encoding="ascii").split()
        except OSError:
            continue
        for child in map(int, started):
            yield child
            yield from children(child)


def measure(pid: int) -> dict[str, float]:
    """Return what a node has just now. OSError if it is gone."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    (threads,) = (line.split()[1] for line in status.splitlines() if line.startswith("Threads:"))
    daemons = sum(process_sizes(child).get("VmRSS", 0) for child in children(pid))
    return {
        "rss_mb": round(process_sizes(pid).get("VmRSS", 0) / 1e6, 1),
        "daemon_mb": round(daemons / 1e6, 1),
        "files": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        "threads": int(threads),
    }


def rounds_of(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    if not path.exists():
        return 0
    with path.open(encoding="utf-8") as lines:
        return sum('"event":"rl"' in line.replace(" ", "") for line in lines)


def watch(options: argparse.Namespace, home: Path) -> Iterator[dict[str, Any]]:
    """Run two nodes; yield a row of each every minute."""
    began = time.monotonic()
    nodes: list[Process] = []

    def node(name: str, policy: str, *arguments: str) -> Process:
        folders = ["--folder", str(home / name), "--identity", str(home / f"{name}.key")]
        own = ["--policy", policy, "--set", "rl.held_out=50"]
        more = ["--name", name, "--threads", "1", "--listen", "/ip4/127.0.0.1/tcp/0"]
        command = [sys.executable, "-m", "shoal", *arguments, *folders, *own, *more]
        nodes.append(Process(home, name, command))
        return nodes[-1]

    task = ["--task", "rl", "--env", "strings", "--method", "none", "--steps", "0"]
    first = node(NODES[0], options.policies[0], "up", *task)
    try:
        link = first.until(
            lambda: next((line for line in first.lines if line.startswith("shoal://")), None),
            "link",
            began,
        )
        node(NODES[1], options.policies[1], "join", link)
        for one in nodes:
            one.until(lambda: rounds_of(home / one.name) > 0, "round", began)  # noqa: B023
        began = time.monotonic()
        for minute in range(options.minutes + 1):
            time.sleep(max(began + minute * MINUTE_S - time.monotonic(), 0.0))
            for one in nodes:
                rounds = rounds_of(home / one.name)
                row = {"node": one.name, "minute": minute, "rounds": rounds}
                yield {**row, **measure(one.process.pid)}
                del one.lines[:-100]
        for one in nodes:
            one.process.send_signal(signal.SIGINT)
        for one in nodes:
            one.end(time.monotonic())
    finally:
        for one in nodes:
            if one.process.poll() is None:
                one.process.kill()
                one.process.wait()


def summary_of(rows: Sequence[Mapping[str, Any]], settled: int) -> dict[str, Any]:
    """Return a node's memory after ``settled`` minutes and at the end, and the range of the rest
    from then on.
    """
    later = [row for row in rows if row["minute"] >= settled]
    if len(later) < 2 * WINDOW:
        return {"minutes": rows[-1]["minute"], "grown": None}
    then = statistics.median(row["rss_mb"] for row in later[:WINDOW])
    end = statistics.median(row["rss_mb"] for row in later[-WINDOW:])
    spans = {name: [min(values), max(values)] for name, values in _columns(later)}
    return {
        "minutes": rows[-1]["minute"],
        "rounds": rows[-1]["rounds"],
        "settled_mb": then,
        "end_mb": end,
        "grown": round(end / then - 1, 4),
        **spans,
    }


def _columns(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[float]]]:
    for name in ("rss_mb", "daemon_mb", "files", "threads"):
        yield name, [row[name] for row in rows]


def kept(path: Path | None, about: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """Return the measurements of each earlier run."""
    runs: dict[int, list[dict[str, Any]]] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path and path.exists() else []
    for row in map(json.loads, lines):
        if row.pop("about") == about:
            runs.setdefault(row.pop("run"), []).append(row)
    return list(runs.values())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=int, default=120)
    parser.add_argument("--settled", type=int, default=10, help="minutes before the comparison")
    parser.add_argument(
        "--policies", nargs=2, default=["tiny::60"] * 2, help="of the nodes, as of `shoal up`"
    )
    parser.add_argument("--resume", type=Path, metavar="FILE", help="a line for each measurement")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args(argv)
    about = {"bench": "hours", "policies": options.policies, "minutes": options.minutes}
    runs = kept(options.resume, about)
    rows = max(runs, key=len, default=[])
    if not options.report and (not rows or rows[-1]["minute"] < options.minutes):
        rows = []
        with tempfile.TemporaryDirectory(prefix="hours-") as folder:
            for row in watch(options, Path(folder)):
                rows.append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
                if options.resume is not None:
                    with options.resume.open("a", encoding="utf-8") as file:
                        file.write(json.dumps({"about": about, "run": len(runs), **row}) + "\n")
    if not rows:
        parser.error("there is nothing to report: run it without --report")
    nodes = {name: [row for row in rows if row["node"] == name] for name in NODES}
    found = {name: summary_of(each, options.settled) for name, each in nodes.items()}
    machine = {"machine": platform.machine(), "python": platform.python_version()}
    if options.json:
        print(json.dumps({**about, **machine, "nodes": found}))
    else:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
