"""How long it takes from the start of a process to its first accepted contribution in a swarm that is under way.

    python bench/join.py --layers 5 --joins 3 --json

Two real nodes train on this machine; others join by `shoal join`, one after the other. Seconds are counted from the start of the
joining process: until it has the swarm's weights, until its first round with others (in which its weight is 0), and until the first
one in which it counts: that is its first accepted contribution. A round has --every inner steps, so the last figure includes two
rounds. Python's own start and that of PyTorch are in all of them, and shown beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

LIMIT_S = 300.0
ROOT = Path(__file__).resolve().parent.parent


class Node:
    """One ``shoal`` process; notes when each line came, counted from its start."""

    def __init__(self, home: Path, name: str, *arguments: str) -> None:
        self.name, self.folder, self.began = name, home / name, time.monotonic()
        self.lines: list[tuple[float, str]] = []
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(home), "OMP_NUM_THREADS": "1"}
        more = ["--name", name, "--folder", str(self.folder), "--identity", str(home / f"{name}.key"), "--threads", "1",
                "--listen", "/ip4/127.0.0.1/tcp/0"]  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shoal", *arguments, *more],
            env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic() - self.began, line.rstrip("\n")))

    def said(self, text: str) -> float | None:
        """When the first line with ``text`` came, seconds."""
        return next((at for at, line in list(self.lines) if text in line), None)

    def rounds(self) -> list[dict[str, Any]]:
        """Its rounds with others so far."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in events if event["event"] == "round" and event["members"] > 1]

    def until(self, condition: Any, what: str) -> float:
        """Seconds after the start at which ``condition`` became true."""
        while not condition():
            if self.process.poll() is not None or time.monotonic() - self.began > LIMIT_S:
                raise SystemExit(f"{self.name}: no {what}; it said: {[line for _, line in self.lines][-3:]}")
            time.sleep(0.02)
        return time.monotonic() - self.began

    def stop(self) -> None:
        """As by Ctrl-C."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)


def _import_s() -> float:
    began = time.monotonic()
    program = [sys.executable, "-c", "import shoal.node.runtime.node_run"]
    subprocess.run(program, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return time.monotonic() - began


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The whole benchmark."""
    found: list[dict[str, float]] = []
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="join-") as folder:
        home = Path(folder)
        table = home / "swarm.toml"
        table.write_text(
            f'[swarm]\nname = "join"\nstart_when = 2\n[outer]\nmethod = "{arguments.method}"\nevery = {arguments.every}\n'
            f"[task.options]\nlayers = {arguments.layers}\nwidth = {arguments.width}\nbatch = 2\n"
        )
        first = Node(home, "first", "up", str(table))
        nodes = [first]
        try:
            first.until(lambda: any(line.startswith("shoal://") for _, line in list(first.lines)), "link")
            link = next(line for _, line in first.lines if line.startswith("shoal://"))
            nodes.append(Node(home, "second", "join", link))
            first.until(lambda: len(first.rounds()) >= 2, "rounds of two")
            for number in range(arguments.joins):
                late = Node(home, f"late{number}", "join", link)
                nodes.append(late)
                late.until(lambda late=late: late.said("took over the swarm's weights") is not None, "weights")
                weights = late.said("took over the swarm's weights")
                once = late.until(lambda late=late: len(late.rounds()) >= 1, "round")
                counted = late.until(lambda late=late: len(late.rounds()) >= 2, "second round")
                assert weights is not None
                found.append({"weights_s": weights, "round_s": once, "contribution_s": counted})
                nodes.pop().stop()
        finally:
            for node in nodes:
                node.stop()
    medians = {name: round(statistics.median(one[name] for one in found), 2) for name in found[0]}
    return {
        "bench": "join", "method": arguments.method, "every": arguments.every, "layers": arguments.layers, "width": arguments.width,
        "joins": len(found), "import_s": round(_import_s(), 2), "load_before": round(load, 2),
        "load_after": round(os.getloadavg()[0], 2), "processors": os.cpu_count(), **medians,
        "all": [{name: round(value, 2) for name, value in one.items()} for one in found],
    }  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="noloco")
    parser.add_argument("--every", type=int, default=10, help="inner steps of a round")
    parser.add_argument("--layers", type=int, default=5, help="5 of width 128: about 1 million parameters")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--joins", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    report = measure(arguments)
    if arguments.json:
        print(json.dumps(report))
        return
    print(
        f"{report['joins']} joins, medians, from the start of the process: weights {report['weights_s']} s, first round "
        f"{report['round_s']} s, first accepted contribution {report['contribution_s']} s (imports alone {report['import_s']} s; "
        f"load {report['load_before']} to {report['load_after']} on {report['processors']} processors)"
    )


if __name__ == "__main__":
    main()
