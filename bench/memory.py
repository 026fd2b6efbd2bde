"""Main memory of a peer beyond the model, its gradients and its inner optimizer: bytes a parameter,
all buffers included.

    python bench/memory.py --params 10e6 --methods noloco,diloco --json

Real nodes train the built-in GPT (bench/_memory_task.py) on this machine, in processes of their own
and over real sockets: two from the start, which exchange and save checkpoints, and one that joins
later, takes their weights and trains with them. Each row has the largest peak of resident memory of
the three (VmHWM of Linux) less that of a process that has loaded the same modules and trains the
same model with the same optimizer alone, divided by the parameters.

Batches are small, so that the peak of a step is not that of its activations. The nodes get
``--ram`` as large as what they need, as they would on a machine that is just large enough: where
memory is plentiful a checkpoint is written from a copy (--roomy).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 900.0
HEADS = 4
TASK = f"{ROOT / 'bench' / '_memory_task.py'}:Bytes"
NEED = 17  # bytes a parameter beyond training alone that a node is allowed, by --ram
QUEUES = 0.05  # of --ram, for what waits in queues


def shape_for(params: float) -> tuple[int, int]:
    """Return layers and width of a GPT with about ``params`` parameters."""
    layers = max(1, round((params / 12 / 64**2) ** (1 / 3)))
    width = HEADS * max(round((params / 12 / layers) ** 0.5 / HEADS), 1)
    return layers, width


class Process:
    """A process of which the peak of resident memory is noted until it ends."""

    def __init__(self, home: Path, name: str, command: list[str]) -> None:
        self.name, self.peak, self.anonymous, self.lines = name, 0, 0, list[str]()
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(home),
            "OMP_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.threads = [
            threading.Thread(target=work, daemon=True) for work in (self._read, self._watch)
        ]
        for thread in self.threads:
            thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    def _watch(self) -> None:
        while self.process.poll() is None:
            found = process_sizes(self.process.pid)
            self.peak = max(self.peak, found.get("VmHWM", 0))
            self.anonymous = max(self.anonymous, found.get("RssAnon", 0))
            time.sleep(0.02)

    def until(self, condition: Any, what: str, began: float) -> Any:
        """Return what ``condition`` returns once it is true."""
        while not (found := condition()):
            if self.process.poll() is not None or time.monotonic() - began > LIMIT_S:
                raise SystemExit(f"{self.name}: no {what}; it said: {self.lines[-5:]}")
            time.sleep(0.05)
        return found

    def end(self, began: float) -> None:
        """Wait until it has ended well."""
        try:
            code = self.process.wait(max(LIMIT_S - (time.monotonic() - began), 1.0))
        except subprocess.TimeoutExpired:
            raise SystemExit(
                f"{self.name} did not end in {LIMIT_S:g} s; it said: {self.lines[-5:]}"
            ) from None
        if code not in (0, 130):
            raise SystemExit(f"{self.name} ended with {code}; it said: {self.lines[-5:]}")
        for thread in self.threads:
            thread.join(5.0)


def process_sizes(pid: int) -> dict[str, int]:
    """Return the sizes in a process's status, bytes; {} if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    words = (line.split() for line in lines)
    return {
        found[0].rstrip(":"): 1024 * int(found[1])
        for found in words
        if len(found) == 3 and found[2] == "kB"
    }


def alone(options: argparse.Namespace) -> None:
    """Train in this process, with nothing of an outer optimizer; print the number of parameters."""
    import torch

    import shoal.node.runtime.training_node  # noqa: F401  (what a node has loaded)
    from bench._memory_task import Bytes
    from shoal.node.task import Shard

    torch.set_num_threads(1)
    task = Bytes(*shape_for(options.params))
    model = task.model()
    inner = task.inner_optimizer(list(model.parameters()))
    batches = task.batches(Shard(0, 8, 0))
    task.evaluate(model)
    for _ in range(10):
        task.loss(model, next(batches)).backward()  # type: ignore[no-untyped-call]
        inner.step()
        inner.zero_grad()
    task.evaluate(model)
    print(sum(parameter.numel() for parameter in model.parameters()))


def baseline(options: argparse.Namespace, home: Path, began: float) -> tuple[int, int, int]:
    """Return the parameters, and the peaks of resident and of anonymous memory, of training
    alone.
    """
    command = [sys.executable, __file__, "--alone", "--params", str(options.params)]
    process = Process(home, "alone", command)
    process.end(began)
    return int(process.lines[-1]), process.peak, process.anonymous


def measure(
    method: str,
    options: argparse.Namespace,
    home: Path,
    plain: tuple[int, int, int],
    *,
    offload: bool,
) -> dict[str, Any]:
    """Return one row."""
    params, peak, anonymous = plain
    layers, width = shape_for(options.params)
    began = time.monotonic()
    lag = (
        f"lag = {options.lag if options.lag.isdigit() else json.dumps(options.lag)}\n"
        if options.lag and overlaps(method)
        else ""
    )
    table = home / "swarm.toml"
    table.write_text(
        f'[swarm]\nname = "memory"\nstart_when = 2\n[outer]\nmethod = "{method}"\nevery = '
        f"{options.every}\n{lag}"
        f"[train]\nsteps = 0\n[task]\nhooks = '{TASK}'\n"
        f"[task.options]\nlayers = {layers}\nwidth = {width}\n[node]\ncheckpoint_every_rounds = 2\n"
    )

    def node(name: str, *arguments: str) -> Process:
        own = [
            "--name",
            name,
            "--folder",
            str(home / name),
            "--identity",
            str(home / f"{name}.key"),
            "--threads",
            "1",
        ]
        more = [
            "--task",
            TASK,
            "--listen",
            "/ip4/127.0.0.1/tcp/0",
            *_extra(options, peak, params, offload=offload),
        ]
        return Process(home, name, [sys.executable, "-m", "shoal", *arguments, *own, *more])

    first = node("first", "up", str(table))
    nodes = [first]
    try:
        link = first.until(
            lambda: next((line for line in first.lines if line.startswith("shoal://")), None),
            "link",
            began,
        )
        nodes.append(node("second", "join", link))
        first.until(lambda: _rounds(home / "first") >= options.rounds, "rounds", began)
        if options.newcomer:
            nodes.append(node("late", "join", link))
            nodes[-1].until(
                lambda: _rounds(home / "late") >= options.rounds, "rounds of the newcomer", began
            )
        for one in nodes:
            one.process.send_signal(signal.SIGINT)
        for one in nodes:
            one.end(began)
    finally:
        for one in nodes:
            if one.process.poll() is None:
                one.process.kill()
                one.process.wait()
    met = {one.name: _rounds(home / one.name) for one in nodes}
    each = {one.name: round((one.peak - peak) / params, 2) for one in nodes}
    held = {one.name: round((one.anonymous - anonymous) / params, 2) for one in nodes}
    return {
        "method": method,
        "lag": options.lag if overlaps(method) else "",
        "offload": offload,
        "roomy": options.roomy,
        "params": params,
        "bytes_per_parameter": max(each.values()),
        "nodes": each,
        "anonymous_bytes_per_parameter": max(held.values()),
        "alone_mb": round(peak / 1e6, 1),
        "rounds_with_others": met,
        "wall_s": round(time.monotonic() - began, 1),
    }


def overlaps(method: str) -> bool:
    """Return True if the method has a lag that can be set."""
    from shoal.optim import METHODS

    return "lag" in METHODS[method].knobs


def _extra(options: argparse.Namespace, peak: int, params: int, *, offload: bool) -> list[str]:
    """Return a node's options: --ram, unless memory is plentiful, and --offload."""
    ram = [] if options.roomy else ["--ram", f"{(peak + NEED * params) / (1 - QUEUES) / 1e9:.4f}"]
    return [*ram, *(["--offload", str(options.offload)] if offload else [])]


def _rounds(folder: Path) -> int:
    """Return the rounds with others in a node's metrics."""
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return sum(event["event"] == "round" and event["members"] > 1 for event in events)


def main(argv: list[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--params", default="10e6,135e6", help="numbers of parameters, with commas between them"
    )
    parser.add_argument(
        "--methods", default="", help="names of methods, with commas between them [default: all]"
    )
    parser.add_argument("--every", type=int, default=8, help="inner steps of a round")
    parser.add_argument(
        "--lag",
        default="",
        help='of methods that overlap: 0 to every - 1, or "auto" [default: the method\'s]',
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=4,
        help="rounds with others before the newcomer comes, and with it",
    )
    parser.add_argument(
        "--newcomer",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="a third node joins later",
    )
    parser.add_argument(
        "--offload",
        type=Path,
        help="measure each method once more, with its state in files in this folder",
    )
    parser.add_argument(
        "--roomy", action="store_true", help="no --ram: checkpoints are written from a copy"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    sizes = [float(text) for text in options.params.split(",")]
    sys.path.insert(0, str(ROOT))
    if options.alone:
        options.params = sizes[0]
        alone(options)
        return
    from shoal.optim import METHODS

    methods = options.methods.split(",") if options.methods else list(METHODS)
    rows, load = [], os.getloadavg()[0]
    for size in sizes:
        options.params = size
        with tempfile.TemporaryDirectory(prefix="memory-") as folder:
            plain = baseline(options, Path(folder), time.monotonic())
        for method, offload in itertools.product(
            methods, [False, True] if options.offload else [False]
        ):
            with tempfile.TemporaryDirectory(prefix="memory-") as folder:
                rows.append(measure(method, options, Path(folder), plain, offload=offload))
            row = rows[-1]
            print(
                f"{row['method']:>11}{' in files' if offload else ''}, {row['params'] / 1e6:.1f} "
                f"million parameters: {row['bytes_per_parameter']:.1f} bytes a parameter "
                f"{row['nodes']}, anonymous {row['anonymous_bytes_per_parameter']:.1f}, in "
                f"{row['wall_s']:.0f} s",
                file=sys.stderr,
            )
    if options.json:
        report = {"bench": "memory", "machine": platform.machine(), "processors": os.cpu_count()}
        print(
            json.dumps(
                {**report, "load": [round(load, 2), round(os.getloadavg()[0], 2)], "rows": rows}
            )
        )


if __name__ == "__main__":
    main()
