"""Processes of the nodes of a chaos run: started, killed, stopped, restarted, and ended in any
case.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.chaos import processes
from bench.chaos.actor_options import HONEST, PROGRAM
from bench.chaos.figures import Life
from shoal.node.checkpoint.folder import steps as saved_steps
from shoal.node.demo.liveness import DemoError
from shoal.node.demo.nodes import Nodes, Process, read_line
from shoal.node.exit_code import ExitCode

END_S, END_EACH_S = (
    20.0,
    1.0,
)  # seconds for all nodes together to end in good order, and more for each
GONE_S = 5.0  # seconds for the guards to end the daemons of killed nodes
LINK_S = 60.0  # seconds for the first node to print its link
TICK_S = 0.05
MARK = "SHOAL_CHAOS"
PORTS = range(
    20_000, 32_000
)  # below the ephemeral ports, so that no other process gets a dead node's port by chance


class ChaosError(DemoError):
    """Failure of a chaos run's swarm to begin."""


@dataclass
class Running:
    """Running process of a node."""

    life: Life
    process: Process
    log: Path
    """File in which it notes its steps."""
    read: int = 0
    """Bytes of the file that were read already."""
    read_out: bool = False
    """True if it has ended, and its end was reported."""
    daemon: int | None = None
    """Process id of its network daemon, once known."""

    @property
    def alive(self) -> bool:
        """True if it is not known to have ended."""
        return self.life.ended is None


class ProcessesUnderTest(Nodes):
    """Nodes with numbers from 0, each one process at a time, with the same key, folder and port
    every time.

    ``lies``: false contributions of the hostile nodes, by number. ``step_s``: least seconds of an
    inner step.
    """

    def __init__(
        self,
        folder: Path,
        *,
        peers: int,
        step_s: float,
        lies: dict[int, str],
        flags: Sequence[str] = (),
    ) -> None:
        self._mark = secrets.token_hex(8)
        super().__init__(
            folder,
            {**os.environ, MARK: self._mark, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self._step_s, self.lies, self._flags = step_s, lies, list(flags)
        self._ports = free_ports(peers)
        self.running: list[Running] = []
        self._stopped_pids: dict[int, list[int]] = {}
        """Stopped process ids by node."""

    @property
    def stopped(self) -> set[int]:
        """Nodes that are stopped by ``pause``."""
        return set(self._stopped_pids)

    def spawn(self, peer: int, arguments: Sequence[str], *, resumed: bool = False) -> Running:
        """Start a node's next process with the command ``arguments``."""
        log = (
            self.folder
            / f"peer-{peer}.steps-{sum(each.life.peer == peer for each in self.running)}"
        )
        life = Life(peer, time.time(), resumed=resumed)
        process = self.start(
            [
                *arguments,
                "--listen",
                f"/ip4/127.0.0.1/tcp/{self._ports[peer]}",
                "--threads",
                "1",
                *self._flags,
            ],
            f"peer-{peer}",
            program=[*PROGRAM, str(log), str(self._step_s), self.lies.get(peer, HONEST)],
        )
        self.running.append(Running(life, process, log))
        return self.running[-1]

    def first_line(self, running: Running, seconds: float) -> str:
        """Return the first line that a node prints, or "" if it prints none in time."""
        return read_line(running.process, seconds)

    def now(self, peer: int) -> Running:
        """Return a node's newest process."""
        return next(each for each in reversed(self.running) if each.life.peer == peer)

    def saved(self, peer: int) -> bool:
        """Return whether a node has a checkpoint."""
        return bool(saved_steps(self.folder / f"peer-{peer}"))

    def forget(self, peer: int) -> None:
        """Remove a node's checkpoints, as if its disk had been lost."""
        for path in (self.folder / f"peer-{peer}").glob("*step-*"):
            shutil.rmtree(path)

    def shoot(self, peer: int) -> float:
        """Kill a node with SIGKILL; return the time. The node's guard ends its daemon."""
        running = self.now(peer)
        running.process.kill()
        running.life.ended, running.life.killed = time.time(), True
        running.process.wait()
        self._stopped_pids.pop(peer, None)
        self.read_steps()
        return running.life.ended

    def pause(self, peer: int, *, daemon: bool) -> None:
        """Stop a node with SIGSTOP, but not its guard, which must end the daemon if this process is
        killed meanwhile.
        """
        pid = self.now(peer).process.pid
        pids = [
            pid,
            *([found] if daemon and (found := processes.daemon_of(pid)) is not None else []),
        ]
        self._stopped_pids[peer] = pids
        self.now(peer).life.stopped.append((time.time(), float("inf")))
        _send(pids, signal.SIGSTOP)

    def wake(self, peer: int) -> None:
        """Continue a node with SIGCONT, if it is stopped."""
        pids = self._stopped_pids.pop(peer, None)
        if pids is not None:
            _send(pids, signal.SIGCONT)
            stopped = self.now(peer).life.stopped
            stopped[-1] = stopped[-1][0], time.time()

    def read_steps(self) -> None:
        """Update all lives from the nodes' notes."""
        for running in (each for each in self.running if not each.read_out):
            running.read_out = not running.alive
            with contextlib.suppress(FileNotFoundError), running.log.open("rb") as file:
                file.seek(running.read)
                data = file.read()
                whole = data.rfind(b"\n") + 1
                running.read += whole
                for line in data[:whole].decode("ascii").splitlines():
                    at, step = line.split()
                    running.life.steps.append((float(at), int(step)))

    def ended(self) -> Iterator[Running]:
        """Yield the processes that have ended by themselves since the last call."""
        for running in self.running:
            if running.alive and running.process.poll() is not None:
                running.life.ended = time.time()
                yield running

    def end(self) -> list[str]:
        """End all nodes in good order; return a sentence for each that did not."""
        for peer in list(self._stopped_pids):
            self.wake(peer)
        alive = [running for running in self.running if running.alive]
        for running in alive:
            running.process.terminate()
        allowed, said = END_S + END_EACH_S * len(alive), []
        until = time.monotonic() + allowed
        for running in alive:
            name = f"peer-{running.life.peer}"
            try:
                code = running.process.wait(max(until - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                running.process.kill()
                running.process.wait()
                said.append(f"{name} did not end within {allowed:g} s of being asked to")
                continue
            # During its imports a node is ended by the signal itself, or by Python's
            # KeyboardInterrupt.
            young = not running.life.steps and code in (-signal.SIGTERM, -signal.SIGINT)
            if code not in (ExitCode.OK, ExitCode.INTERRUPTED) and not young:
                said.append(
                    f"{name} ended with code {code} when it was asked to end: "
                    f"{self.last_log_line(running.life.peer)}"
                )
        return said

    def left_behind(self) -> list[str]:
        """Return the processes, and folders of daemons' sockets, that remain some seconds after the
        end of all nodes.
        """
        until = time.monotonic() + GONE_S
        tick = threading.Event()
        while (found := self._orphans()) and time.monotonic() < until:
            tick.wait(TICK_S)
        return found

    def _orphans(self) -> list[str]:
        found = [f"process {pid}" for pid in processes.marked(f"{MARK}={self._mark}")]
        for base in {Path(tempfile.gettempdir()), Path("/tmp")}:
            for running in self.running:
                found += map(str, (base / f"shoal-{os.getuid()}").glob(f"{running.process.pid}-*"))
        return found

    def __enter__(self) -> ProcessesUnderTest:
        super().__enter__()
        return self

    def kill(self) -> None:
        """Kill all at once, stopped ones too."""
        super().kill()
        for pids in self._stopped_pids.values():
            _send(pids, signal.SIGKILL)

    def __exit__(self, *error: object) -> None:
        for peer in list(self._stopped_pids):
            self.wake(peer)
        super().__exit__(*error)


def free_ports(count: int) -> list[int]:
    """Return TCP ports of the loopback on which nobody listens now.

    ChaosError if there are too few.
    """
    found: list[int] = []
    for port in random.Random(os.urandom(8)).sample(PORTS, 100 + 4 * count):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            found.append(port)
            if len(found) == count:
                return found
    raise ChaosError(
        f"This machine has too few free ports for {count} nodes: end what listens on so many, or "
        "try fewer --peers."
    )


def _send(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
