"""The processes of a demo's nodes: started by the commands that a user would type, and ended
whatever happens.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO

from shoal.node.demo.liveness import DemoError, Liveness
from shoal.node.exit_code import ExitCode
from shoal.node.runtime.display import Display
from shoal.node.runtime.run_options import handle_all
from shoal.swarm.p2p.daemon_process import check_shared_memory

FINISHED = (ExitCode.OK, ExitCode.TRAINED_ALONE)
"""The end of a node that went to its end."""
STOP_S = 8.0
STOP_EACH_S = 0.5
"""That the nodes have to end orderly, and more for each."""
KILLED_S = 5.0
"""For the system to end a process that was killed."""
LOOK_S = 0.5
"""Between two looks at what the nodes do."""
TRACEBACK = "Traceback (most recent call last):"
USERS_ERROR = "Error: Your "
"""In the log of a node whose task failed."""

Process = subprocess.Popen[str]


def interpreter() -> list[str]:
    """Return the command of this Python, for ``-m``, which alone would put the present folder
    before all that is installed.

    There a file of the user's, such as queue.py, would hide a module of Python's own.
    """
    # This process has it there if its user wanted it so.
    if sys.path[:1] == [os.getcwd()]:
        return [sys.executable]
    return [sys.executable, "-P"]


class Nodes:
    """Processes of a demo.

    All are ended when the block is left, whatever happened. ``env``: their environment, if not this
    one.

    Raises StartupError: the system has no shared memory, so none of them could start.
    """

    def __init__(self, folder: Path, env: Mapping[str, str] | None = None) -> None:
        check_shared_memory()
        self.folder = folder
        self.processes: list[Process] = []
        self._env = env
        self._logs: list[IO[str]] = []
        self._stopped = False

    def __enter__(self) -> Nodes:
        handle_all(self._interrupt)
        return self

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        # A closed terminal sends several.
        if self._stopped and number == signal.SIGHUP:
            return
        # The second signal: end at once.
        if self._stopped:
            self.kill()
            os._exit(ExitCode.INTERRUPTED)
        self._stopped = True
        raise KeyboardInterrupt

    def start(
        self, arguments: Sequence[str], name: str, *, program: Sequence[str] = ("shoal",)
    ) -> Process:
        """Start ``shoal ARGUMENTS`` as the node ``name``.

        ``program``: another module with a main program, and what precedes ARGUMENTS.
        """
        log = (self.folder / f"{name}.log").open("a", encoding="utf-8")
        self._logs.append(log)
        command = [*program, *arguments, "--name", name, "--folder", str(self.folder / name)]
        command += ["--identity", str(self.folder / f"{name}.key")]
        command += ["--with-parent", str(os.getpid())]
        process = _run(command, log, self._env)
        self.processes.append(process)
        return process

    def check(self) -> bool:
        """Return whether all went to their end.

        Raises DemoError, with the end of its log, if one failed.
        """
        codes = [process.poll() for process in self.processes]
        for index, code in enumerate(codes):
            if code not in (None, *FINISHED):
                raise self.failure(index, code)
        return None not in codes

    def failure(self, index: int, code: int | None, what: str = "ended") -> DemoError:
        """Return the error of a node that ended with ``code``.

        If its task failed, that is the user's own error here too.
        """
        said = self.last_log_line(index)
        error = DemoError(f"Node peer-{index} {what} with code {code}: {said}")
        if code == ExitCode.BAD_INPUT:
            error.exit_code = ExitCode.BAD_INPUT
            log = self._log(index)
            begin = log.rfind(TRACEBACK)
            if begin >= 0 and said.startswith(USERS_ERROR):
                error.trace = log[begin : log.rfind(said)]
        return error

    def _log(self, index: int) -> str:
        path = self.folder / f"peer-{index}.log"
        return path.read_text(encoding="utf-8", errors="replace")

    def last_log_line(self, index: int) -> str:
        lines = self._log(index).strip().splitlines()
        return lines[-1] if lines else "it logged nothing; run again with --verbose."

    def kill(self) -> None:
        """Kill all at once; their guards end the daemons."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()

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
                process.wait(KILLED_S)
            if process.stdout is not None:
                process.stdout.close()
        for log in self._logs:
            log.close()


def start_first(nodes: Nodes, arguments: list[str], display: Display, liveness: Liveness) -> str:
    """Start the node that creates the swarm; return the link.

    Raises DemoError if it ends or moves no more before it prints it.
    """
    # A large model takes minutes to load.
    link = read_line(nodes.start(arguments, "peer-0"), math.inf, liveness.look)
    if not link:
        # It closes its output a moment before it has ended.
        with suppress(subprocess.TimeoutExpired):
            nodes.processes[0].wait(1.0)
        nodes.check()
        raise DemoError(f"The first node printed no link: {nodes.last_log_line(0)}")
    display.message(f"the swarm is up: {link}")
    return link


def read_line(process: Process, seconds: float, look: Callable[[], object] = lambda: None) -> str:
    """Return the first line of a node's stdout, or "" when it ended or the time is up; ``look`` is
    called every `LOOK_S`.
    """
    stdout = process.stdout
    lines = list[str]()
    until = time.monotonic() + seconds
    assert stdout is not None
    reader = threading.Thread(target=lambda: lines.append(stdout.readline()), daemon=True)
    reader.start()
    while reader.is_alive():
        left = until - time.monotonic()
        if left <= 0:
            break
        reader.join(min(left, LOOK_S))
        look()
    return lines[0].strip() if lines else ""


def _run(
    command: Sequence[str], log: IO[str], env: Mapping[str, str] | None
) -> subprocess.Popen[str]:
    """Run ``python -m COMMAND`` in a session of its own: Ctrl-C is for the demo, which then ends
    its nodes orderly.
    """
    return subprocess.Popen(
        [*interpreter(), "-m", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env=env,
        start_new_session=True,
    )
