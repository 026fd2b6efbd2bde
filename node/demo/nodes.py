"""The processes of a demo's nodes: started by the commands that a user would type, watched, and ended whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO

from shoal.node.demo.forked import ForkedProcess, ForkServer, interpreter
from shoal.node.demo.liveness import DemoError, Liveness
from shoal.node.exit_codes import ExitCode
from shoal.node.runtime.display import Display
from shoal.node.runtime.signals import handle_all

STOP_S, STOP_EACH_S = 8.0, 0.5  # seconds that the nodes have to end orderly, and more for each
LOOK_S = 0.5
TRACEBACK, USERS_ERROR = "Traceback (most recent call last):", "Error: Your "  # in the log of a node whose task failed

Process = ForkedProcess | subprocess.Popen[str]


class Nodes:
    """Processes of a demo. All are ended when the block is left, whatever happened. ``env``: their environment, if not this one.

    On Linux a `ForkServer` forks them, so that modules are imported, and held in memory, once for all of them.
    """

    def __init__(self, folder: Path, env: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.processes: list[Process] = []
        self._env = env
        self._server: ForkServer | None = None
        self._logs: list[IO[str]] = []
        self._stopped = False

    def __enter__(self) -> Nodes:
        handle_all(self._interrupt)
        return self

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._stopped and number == signal.SIGHUP:  # a closed terminal sends several
            return
        if self._stopped:  # the second signal: end at once
            self.kill()
            os._exit(ExitCode.INTERRUPTED)
        self._stopped = True
        raise KeyboardInterrupt

    def start(self, arguments: Sequence[str], name: str, *, program: Sequence[str] = ("shoal",)) -> Process:
        """Start ``shoal ARGUMENTS`` as the node ``name``. ``program``: another module with a main program, and what precedes
        ARGUMENTS. Raises DemoError.
        """
        log = (self.folder / f"{name}.log").open("a", encoding="utf-8")
        self._logs.append(log)
        forks = sys.platform == "linux"
        if forks and self._server is None:
            self._server = ForkServer(self.folder, self._env)
        parent = os.getpid() if self._server is None else self._server.pid
        command = [*program, *arguments, "--name", name, "--folder", str(self.folder / name)]
        command += ["--identity", str(self.folder / f"{name}.key"), "--with-parent", str(parent)]
        process = _run(command, log, self._env) if self._server is None else self._server.start(command, log, name)
        self.processes.append(process)
        return process

    def check(self) -> bool:
        """Return whether all have ended well. Raises DemoError, with the end of its log, if one failed."""
        for index, process in enumerate(self.processes):
            if (code := process.poll()) not in (None, 0):
                raise self.failure(index, code)
        return all(process.poll() == 0 for process in self.processes)

    def failure(self, index: int, code: int | None, what: str = "ended") -> DemoError:
        """Return the error of a node that ended with ``code``. If its task failed, that is the user's own error here too."""
        said = self.last_log_line(index)
        error = DemoError(f"Node peer-{index} {what} with code {code}: {said}")
        if code == ExitCode.BAD_INPUT:
            error.exit_code = ExitCode.BAD_INPUT
            log = (self.folder / f"peer-{index}.log").read_text(encoding="utf-8", errors="replace")
            begin = log.rfind(TRACEBACK)
            if begin >= 0 and said.startswith(USERS_ERROR):
                error.trace = log[begin : log.rfind(said)]
        return error

    def last_log_line(self, index: int) -> str:
        """Return the last line that a node logged."""
        lines = (self.folder / f"peer-{index}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "it logged nothing; run again with --verbose."

    def kill(self) -> None:
        """Kill all at once; their guards end the daemons."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()

    def end_server(self) -> None:
        """End what forks the nodes; then none can be started. All have ended."""
        if self._server is not None:
            self._server.close()

    def __exit__(self, *error: object) -> None:
        until = time.monotonic() + STOP_S + STOP_EACH_S * len(self.processes)
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        for process in self.processes:
            try:
                process.wait(max(until - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(5.0)
            if process.stdout is not None:
                process.stdout.close()
        self.end_server()
        for log in self._logs:
            log.close()


def start_first(nodes: Nodes, arguments: list[str], display: Display, liveness: Liveness) -> str:
    """Start the node that creates the swarm; return the link. Raises DemoError if it ends or moves no more before it prints it."""
    lines: list[str] = []
    reader = threading.Thread(target=_read_line, args=(nodes.start(arguments, "peer-0"), lines), daemon=True)
    reader.start()
    while reader.is_alive():  # a large model takes minutes to load
        reader.join(LOOK_S)
        liveness.look()
    link = lines[0].strip()
    if not link:
        with suppress(subprocess.TimeoutExpired):  # it closes its output a moment before it has ended
            nodes.processes[0].wait(1.0)
        nodes.check()
        raise DemoError(f"The first node printed no link: {nodes.last_log_line(0)}")
    display.message(f"the swarm is up: {link}")
    return link


def read_line(process: Process, seconds: float) -> str:
    """Return the first line of a node's stdout, or "" when it ended or the time is up."""
    lines: list[str] = []
    reader = threading.Thread(target=_read_line, args=(process, lines), daemon=True)
    reader.start()
    reader.join(seconds)
    return lines[0].strip() if lines else ""


def _read_line(process: Process, lines: list[str]) -> None:
    assert process.stdout is not None
    lines.append(process.stdout.readline())


def _run(command: Sequence[str], log: IO[str], env: Mapping[str, str] | None) -> subprocess.Popen[str]:
    """Run ``python -m COMMAND`` in a session of its own: Ctrl-C is for the demo, which then ends its nodes orderly."""
    return subprocess.Popen(
        [*interpreter(), "-m", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env=env,
        start_new_session=True,
    )
