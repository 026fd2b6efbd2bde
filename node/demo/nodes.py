"""The processes of a demo's nodes: started by the commands that a user would type, watched, and
ended whatever happens.
"""

from __future__ import annotations

import json
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
from typing import IO, Any

from shoal.node.console import ExitCode
from shoal.node.runtime.display import ACTIVITY, Display
from shoal.node.runtime.run_options import METRICS, handle_all
from shoal.swarm.errors import ShoalError
from shoal.swarm.p2p.daemon_process import check_shared_memory

# Whether the nodes of a demo still move: by what they write, and by what they say that they do
# meanwhile.

# seconds in which no node writes anything, or says that it moves, after which the demo is given up
QUIET_S = 120.0
# nodes on a processor; more of them have as many times as long, for each gets less of it than tells
# that it moves
CROWD = 8
# seconds for which a node may compute without a step or anything else that it writes: an endless
# loop computes too
LONG_S = 3600.0


class DemoError(ShoalError):
    """A node of the demo failed.

    ``trace``: the traceback of the user's own code in it, if that was the cause.
    """

    exit_code = ExitCode.SWARM_FAILED
    trace = ""


class EventReader:
    """Reader of the events that a node writes. Each call of `read` parses only what is new."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self.events: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        """Return all events that the node has written so far, oldest first."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._at)
                whole, end, _ = file.read().rpartition(b"\n")  # the last line may be half written
            self._at += len(whole + end)
            self.events += [json.loads(line) for line in whole.splitlines()]
        return self.events


class Liveness:
    """Watcher of the nodes with these ``folders``, which need not exist yet, on so many
    ``processors``; ``clock``: seconds.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        clock: Callable[[], float] = time.monotonic,
        processors: int | None = None,
    ) -> None:
        self._quiet_s = QUIET_S * max(
            len(folders) / (CROWD * (processors or os.cpu_count() or 1)), 1.0
        )
        self._names = [folder.name for folder in folders]
        self._readers = [EventReader(folder / METRICS) for folder in folders]
        self._clock = clock
        self._moved = (0, 0, 0)
        self._alive = 0
        self._moved_at = self._alive_at = clock()

    def look(self, ended: int = 0) -> list[list[dict[str, Any]]]:
        """Return all events of each node so far.

        ``ended``: the number of nodes that have ended well.

        Raises DemoError: nothing moved for `QUIET_S` seconds (`CROWD`), or nodes only computed,
        without an end, for `LONG_S`.
        """
        events, now = [reader.read() for reader in self._readers], self._clock()
        said = [event for node in events for event in node if event["event"] == ACTIVITY]
        alive = sum(bool(event["alive"]) for event in said)
        steps = sum(
            max((event["step"] for event in node if event["event"] == ACTIVITY), default=0)
            for node in events
        )
        moved = (sum(map(len, events)) - len(said), steps, ended)
        if moved != self._moved:
            self._moved = moved
            self._moved_at = now
            self._alive_at = now
        if alive != self._alive:
            self._alive = alive
            self._alive_at = now
        if now - self._alive_at > self._quiet_s:
            raise DemoError(
                f"No node made progress for {self._quiet_s:g} s{self._doing(events)}: {_REMEDY}"
            )
        if now - self._moved_at > LONG_S:
            raise DemoError(
                f"No node finished anything in {LONG_S / 60:g} minutes{self._doing(events)}: "
                f"{_REMEDY}"
            )
        return events

    def _doing(self, events: Sequence[Sequence[dict[str, Any]]]) -> str:
        last = [(name, node[-1]) for name, node in zip(self._names, events, strict=True) if node]
        found = [
            f"{name} was {e['doing']} for {e['seconds']:.0f} s"
            for name, e in last
            if e["event"] == ACTIVITY
        ]
        return f" ({', '.join(found)})" if found else ""


_REMEDY = "run again with --verbose --keep FOLDER and read its logs."


def interpreter() -> list[str]:
    """Return the command of this Python, for ``-m``, which alone would put the present folder
    before all that is installed.

    There a file of the user's, such as queue.py, would hide a module of Python's own.
    """
    safe = sys.path[:1] != [os.getcwd()]  # of this process, if its user wanted it so
    return [sys.executable, *(["-P"] if safe else [])]


FINISHED = (ExitCode.OK, ExitCode.TRAINED_ALONE)  # the end of a node that went to its end
STOP_S, STOP_EACH_S = 8.0, 0.5  # seconds that the nodes have to end orderly, and more for each
LOOK_S = 0.5
TRACEBACK, USERS_ERROR = (
    "Traceback (most recent call last):",
    "Error: Your ",
)  # in the log of a node whose task failed

Process = subprocess.Popen[str]


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
        if self._stopped and number == signal.SIGHUP:  # a closed terminal sends several
            return
        if self._stopped:  # the second signal: end at once
            self.kill()
            os._exit(ExitCode.INTERRUPTED)
        self._stopped = True
        raise KeyboardInterrupt

    def start(
        self, arguments: Sequence[str], name: str, *, program: Sequence[str] = ("shoal",)
    ) -> Process:
        """Start ``shoal ARGUMENTS`` as the node ``name``.

        ``program``: another module with a main program, and what precedes
        ARGUMENTS.
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
            log = (self.folder / f"peer-{index}.log").read_text(encoding="utf-8", errors="replace")
            begin = log.rfind(TRACEBACK)
            if begin >= 0 and said.startswith(USERS_ERROR):
                error.trace = log[begin : log.rfind(said)]
        return error

    def last_log_line(self, index: int) -> str:
        lines = (
            (self.folder / f"peer-{index}.log")
            .read_text(encoding="utf-8", errors="replace")
            .strip()
            .splitlines()
        )
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
                process.wait(5.0)
            if process.stdout is not None:
                process.stdout.close()
        for log in self._logs:
            log.close()


def start_first(nodes: Nodes, arguments: list[str], display: Display, liveness: Liveness) -> str:
    """Start the node that creates the swarm; return the link.

    Raises DemoError if it ends or moves no more before it prints it.
    """
    link = read_line(
        nodes.start(arguments, "peer-0"), math.inf, liveness.look
    )  # a large model takes minutes to load
    if not link:
        with suppress(
            subprocess.TimeoutExpired
        ):  # it closes its output a moment before it has ended
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
    while reader.is_alive() and (left := until - time.monotonic()) > 0:
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
