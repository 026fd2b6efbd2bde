"""How long it takes from the start of a process to its first accepted contribution in a swarm that
is under way.

    python bench/join.py --layers 5 --joins 3 --json
    python bench/join.py --layers 0                     # the built-in model as it is

Two real nodes train on this machine; others join by `shoal join`, one after the other. Seconds are
counted from the start of the joining process: until it has the weights, until its first step, until
its first round with others (in which its weight is 0), and until the first one in which it counts:
that is its first accepted contribution. A round has --every inner steps, so the last figure
includes two rounds. Python's own start and that of PyTorch are in all of them.

Where that time goes is in a table from the nodes' own metrics (the event `begun`), with the
processor seconds of the process, which depend less on what else the machine does. Beside them:
`shoal --help`, and `shoal up` alone up to its first step.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
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
        self.name, self.folder, self.began, self.began_at = (
            name,
            home / name,
            time.monotonic(),
            time.time(),
        )
        self.lines: list[tuple[float, str]] = []
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(home),
            "OMP_NUM_THREADS": "1",
        }
        more = [
            "--name",
            name,
            "--folder",
            str(self.folder),
            "--identity",
            str(home / f"{name}.key"),
            "--threads",
            "1",
            "--listen",
            "/ip4/127.0.0.1/tcp/0",
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shoal", *arguments, *more],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic() - self.began, line.rstrip("\n")))

    def said(self, text: str) -> float | None:
        """When the first line with ``text`` came, seconds."""
        return next((at for at, line in list(self.lines) if text in line), None)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Its metrics of one kind so far."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in events if event["event"] == kind]

    def rounds(self) -> list[dict[str, Any]]:
        """Its rounds with others so far."""
        return [event for event in self.events("round") if event["members"] > 1]

    def phases(self) -> list[dict[str, Any]]:
        """What it did up to its first step: ``at_s``, seconds after its start when that began, and
        ``cpu_s`` used by then.
        """
        self.until(lambda: self.events("begun"), "first step")
        found = self.events("begun")[0]["phases"]
        return [
            {"doing": one["doing"], "at_s": one["time"] - self.began_at, "cpu_s": one["cpu_s"]}
            for one in found
        ]

    def cpu_s(self) -> float | None:
        """Processor seconds of the process so far, without its daemon; None where the system does
        not show them.
        """
        try:
            fields = (
                Path(f"/proc/{self.process.pid}/stat")
                .read_text(encoding="utf-8")
                .rpartition(")")[2]
                .split()
            )
        except OSError:
            return None
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def until(self, condition: Any, what: str) -> float:
        """Seconds after the start at which ``condition`` became true."""
        while not condition():
            if self.process.poll() is not None or time.monotonic() - self.began > LIMIT_S:
                raise SystemExit(
                    f"{self.name}: no {what}; it said: {[line for _, line in self.lines][-3:]}"
                )
            time.sleep(0.02)
        return time.monotonic() - self.began

    def stop(self) -> None:
        """As by Ctrl-C."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)


def help_s(times: int = 5) -> tuple[float, float]:
    """Seconds that ``shoal --help`` takes, and processor seconds: medians."""
    found = []
    for _ in range(times):
        began, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        program, environment = (
            [sys.executable, "-m", "shoal", "--help"],
            {**os.environ, "PYTHONPATH": str(ROOT)},
        )
        subprocess.run(program, check=True, env=environment, stdout=subprocess.DEVNULL)
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(
            (time.monotonic() - began, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime)
        )
    return statistics.median(wall for wall, _ in found), statistics.median(cpu for _, cpu in found)


def table_of(arguments: argparse.Namespace, peers: int) -> str:
    """The settings of a swarm that begins with so many peers."""
    size = (
        f"layers = {arguments.layers}\nwidth = {arguments.width}\nbatch = 2\n"
        if arguments.layers
        else ""
    )
    return (
        f'[swarm]\nname = "join"\nstart_when = {peers}\n[outer]\nmethod = '
        f'"{arguments.method}"\nevery = {arguments.every}\n'
        f"[train]\nsteps = 0\n[task.options]\n{size}"
    )


def together(every: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The medians of several nodes' phases; those that all of them had, in the order of the
    first.
    """
    shared = []
    for number, one in enumerate(every[0]):
        same = [
            phases[number]
            for phases in every
            if len(phases) == len(every[0]) and phases[number]["doing"] == one["doing"]
        ]
        medians = {
            key: round(statistics.median(phase[key] for phase in same), 2)
            for key in ("at_s", "cpu_s")
        }
        shared.append({"doing": one["doing"], **medians})
    return shared


def alone(home: Path, number: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The phases of a node that creates a swarm and waits for nobody."""
    table = home / "alone.toml"
    table.write_text(table_of(arguments, 1))
    node = Node(home, f"alone{number}", "up", str(table))
    try:
        return node.phases()
    finally:
        node.stop()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The whole benchmark."""
    found: list[dict[str, float]] = []
    phases: list[list[dict[str, Any]]] = []
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="join-") as folder:
        home = Path(folder)
        table = home / "swarm.toml"
        table.write_text(table_of(arguments, 2))
        up, helped = (
            together([alone(home, number, arguments) for number in range(arguments.ups)])
            if arguments.ups
            else [],
            help_s(),
        )
        first = Node(home, "first", "up", str(table))
        nodes = [first]
        try:
            first.until(
                lambda: any(line.startswith("shoal://") for _, line in list(first.lines)), "link"
            )
            link = next(line for _, line in first.lines if line.startswith("shoal://"))
            nodes.append(Node(home, "second", "join", link))
            first.until(lambda: len(first.rounds()) >= 2, "rounds of two")
            for number in range(arguments.joins):
                late = Node(home, f"late{number}", "join", link)
                nodes.append(late)
                late.until(
                    lambda late=late: late.said("took over the swarm's weights") is not None,
                    "weights",
                )
                weights = late.said("took over the swarm's weights")
                once = late.until(lambda late=late: len(late.rounds()) >= 1, "round")
                counted = late.until(lambda late=late: len(late.rounds()) >= 2, "second round")
                assert weights is not None
                used = late.cpu_s()
                phases.append(late.phases())
                began = phases[-1]
                found.append(
                    {
                        "import_s": began[0]["at_s"],
                        "weights_s": weights,
                        "first_step_s": began[-1]["at_s"],
                        "round_s": once,
                        "contribution_s": counted,
                        "contribution_cpu_s": used or math.nan,
                    }
                )
                nodes.pop().stop()
        finally:
            for node in nodes:
                node.stop()
    medians = {name: round(statistics.median(one[name] for one in found), 2) for name in found[0]}
    return {
        "bench": "join",
        "method": arguments.method,
        "every": arguments.every,
        "layers": arguments.layers,
        "width": arguments.width,
        "joins": len(found),
        "help_s": round(helped[0], 3),
        "help_cpu_s": round(helped[1], 3),
        "up_first_step_s": up[-1]["at_s"] if up else None,
        "up_first_step_cpu_s": up[-1]["cpu_s"] if up else None,
        "load_before": round(load, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "processors": os.cpu_count(),
        **medians,
        "up_phases": up,
        "phases": together(phases),
        "all": [{name: round(value, 2) for name, value in one.items()} for one in found],
    }


def main(argv: list[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", default="noloco")
    parser.add_argument("--every", type=int, default=10, help="inner steps of a round")
    parser.add_argument(
        "--layers",
        type=int,
        default=5,
        help="5 of width 128: about 1 million parameters; 0: the built-in model",
    )
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument(
        "--params", type=float, help="about so many parameters, in place of --layers and --width"
    )
    parser.add_argument("--joins", type=int, default=3)
    parser.add_argument(
        "--ups",
        type=int,
        default=1,
        help="times that a node is started alone; 0 for a large model, whose first evaluation "
        "takes long",
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    if arguments.params:
        sys.path.insert(0, str(ROOT))
        from bench.memory import shape_for

        arguments.layers, arguments.width = shape_for(arguments.params)
    report = measure(arguments)
    if arguments.json:
        print(json.dumps(report))
        return
    print(
        f"{report['joins']} joins, medians, from the start of the process: imports "
        f"{report['import_s']} s, weights {report['weights_s']} s, first step "
        f"{report['first_step_s']} s, first round {report['round_s']} s, first accepted "
        f"contribution {report['contribution_s']} s ({report['contribution_cpu_s']} s of a "
        f"processor); shoal up to its first step {report['up_first_step_s']} s "
        f"({report['up_first_step_cpu_s']}), shoal --help {report['help_s']} s "
        f"({report['help_cpu_s']}); load {report['load_before']} to {report['load_after']} on "
        f"{report['processors']} processors"
    )
    for title, phases in (("shoal join", report["phases"]), ("shoal up", report["up_phases"])):
        print(f"\n| {title}: began | after s | processor s by then |\n|---|---|---|")
        for phase in phases:
            print(f"| {phase['doing']} | {phase['at_s']:.2f} | {phase['cpu_s']:.2f} |")


if __name__ == "__main__":
    main()
