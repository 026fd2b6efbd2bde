"""What a node of `shoal demo` costs, and how long it takes until all of them train.

    python bench/demo.py --peers 4,16,32 --rounds 10 --json

Runs the demo with so many peers, and looks every few seconds at all of its processes in Linux's
/proc: the memory that a node and its daemon have to themselves and their part of what they share
(PSS), and the processor seconds that they used. Seconds until all train, exchanges without a
partner and the rest are the demo's own figures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
DAEMON, GUARD = "p2pd", "daemon_guard"
OWN = (
    "peers",
    "rounds",
    "start_s",
    "pairs_none",
    "exchanges",
    "loss_first",
    "loss_last",
    "wait_s",
    "wall_s",
    "seconds",
)


def kind(process: psutil.Process) -> str:
    """Return what a process of the demo is: node, daemon or guard."""
    command = " ".join(process.cmdline())
    if DAEMON in process.name():
        return "daemon"
    if GUARD in command:
        return "guard"
    return "node"


class Usage:
    """Sums over the processes of each kind, the largest seen at once (MB) and all (processor
    seconds).
    """

    def __init__(self) -> None:
        self.peak: dict[str, float] = {}
        self.peak_mb = 0.0
        self._cpu: dict[int, tuple[str, float]] = {}

    def look(self, demo: int) -> None:
        """Add what the processes below ``demo`` use now."""
        now: dict[str, float] = {}
        for process in psutil.Process(demo).children(recursive=True):
            try:
                what, times = kind(process), process.cpu_times()
                now[what] = now.get(what, 0.0) + process.memory_full_info().pss / 1e6
                self._cpu[process.pid] = what, times.user + times.system
            except (psutil.Error, AttributeError):  # it has ended
                continue
        if sum(now.values()) > self.peak_mb:
            self.peak, self.peak_mb = now, sum(now.values())

    def cpu(self) -> dict[str, float]:
        """Return the processor seconds by kind."""
        found: dict[str, float] = {}
        for what, seconds in self._cpu.values():
            found[what] = found.get(what, 0.0) + seconds
        return found


def measure(peers: int, chosen: argparse.Namespace) -> dict[str, Any]:
    """Run one demo."""
    usage, load = Usage(), os.getloadavg()[0]
    command = [
        sys.executable,
        "-m",
        "shoal",
        "demo",
        "--peers",
        str(peers),
        "--rounds",
        str(chosen.rounds),
        "--json",
    ]
    command += ["--no-compare"] if not chosen.compare else []
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as said:
        demo = subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=out, stderr=said
        )
        try:
            while demo.poll() is None:
                usage.look(demo.pid)
                time.sleep(chosen.every)
        finally:
            demo.terminate()
            demo.wait()
        said.seek(0)
        if demo.returncode:
            raise SystemExit(
                f"the demo of {peers} ended with code {demo.returncode}: {said.read()[-2000:]}"
            )
        out.seek(0)
        report = json.loads(out.read().splitlines()[-1])
    each = {f"{what}_mb": sum_mb / peers for what, sum_mb in usage.peak.items()}
    spent = {f"{what}_cpu_s": seconds / peers for what, seconds in usage.cpu().items()}
    return {
        **{key: report[key] for key in OWN},
        "peak_mb": usage.peak_mb,
        **each,
        **spent,
        "load": load,
    }


def main() -> None:
    """Measure each number of peers, and print a table, or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", default="4,16,32")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--compare", action="store_true", help="let each node train alone too")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two looks")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    found = [measure(peers, chosen) for peers in map(int, chosen.peers.split(","))]
    if chosen.json:
        print(json.dumps(found))
        return
    for one in found:
        print(", ".join(f"{key} {value:.4g}" for key, value in one.items() if value is not None))


if __name__ == "__main__":
    main()
