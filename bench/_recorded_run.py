"""A real swarm on this machine, recorded by `shoal watch` while one of its nodes is killed and
later comes back.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.chaos.processes_under_test import LINK_S, free_ports
from shoal.node.demo.nodes import Nodes, Process, read_line
from shoal.node.watch.events import Heard
from shoal.node.watch.source import recorded

NAMES = ("anna", "bert", "carl", "dora")
READY_S = 180.0
SETTINGS = (
    "swarm.start_when=4",
    "outer.wait_s=10.0",
    "train.steps=0",
    "node.checkpoint_every_rounds=2",
)


def record(file: Path, folder: Path, *, seconds: float, every: int) -> tuple[float, float]:
    """Record ``seconds`` of four nodes' training into ``file``; return the Unix times of the kill
    and of the return.

    The last of them is killed after a third of the time, and started again after two thirds.
    """
    tick = threading.Event()
    with Nodes(folder, {**os.environ}) as nodes:
        ports = free_ports(len(NAMES))

        def start(command: Sequence[str], index: int, *more: str) -> Process:
            own = [
                "--shard",
                f"{index}/{len(NAMES)}",
                "--threads",
                "1",
                "--listen",
                f"/ip4/127.0.0.1/tcp/{ports[index]}",
            ]
            return nodes.start(
                [*command, *own, *more, "--device", "cpu", "--set", SETTINGS[-1]], NAMES[index]
            )

        sets = [word for setting in SETTINGS[:-1] for word in ("--set", setting)]
        link = read_line(start(["up", "--every", str(every)], 0, *sets), LINK_S)
        for index in range(1, len(NAMES)):
            last = start(["join", link], index)
        with watching(link, file):
            for _ in range(int(READY_S)):  # until each has finished a round
                tick.wait(1.0)
                if len(trains(file)) == len(NAMES):
                    break
            begin = min(trains(file).values())
            tick.wait(seconds / 3)
            last.kill()
            killed = newest(file)
            tick.wait(seconds / 3)
            start(["join", link], len(NAMES) - 1, "--resume")
            back = newest(file)
            tick.wait(seconds / 3)
        print(f"{file}: from {begin:.0f}, killed at {killed:.0f}, back at {back:.0f}")
        for process in nodes.processes:
            process.terminate()
    return killed, back


@contextmanager
def watching(link: str, file: Path) -> Iterator[None]:
    """Record the swarm of ``link`` into ``file`` within the block."""
    command = [sys.executable, "-m", "shoal", "watch", link, "--json", "--record", str(file)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.terminate()


def trains(file: Path) -> dict[str, float]:
    """Return the time of the first finished round of each node, by name, as recorded so far."""
    found: dict[str, float] = {}
    for event in recorded(file) if file.exists() else ():
        if isinstance(event, Heard) and event.status.rounds:
            found.setdefault(event.status.name, event.time)
    return found


def newest(file: Path) -> float:
    """Return the time of the newest recorded event."""
    return max(event.time for event in recorded(file))
