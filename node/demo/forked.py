"""Nodes that a `shoal.node.demo.fork_server` forks: how the demo starts it, and what it knows of each node."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from shoal.node.demo.liveness import DemoError

PROGRAM = ("-m", "shoal.node.demo.fork_server")
LOG = "fork-server.log"
READY_S = 120.0  # seconds for the server to import everything, on a busy machine, and to fork
END_S = 5.0
ANSWER = 32  # bytes of a process id, or an exit code


def interpreter() -> list[str]:
    """Return the command of this Python, for ``-m``, which alone would put the present folder before all that is installed.

    There a file of the user's, such as queue.py, would hide a module of Python's own; before 3.11 it cannot be prevented.
    """
    safe = sys.version_info >= (3, 11) and sys.path[:1] != [os.getcwd()]  # of this process, if its user wanted it so
    return [sys.executable, *(["-P"] if safe else [])]


class ForkedProcess:
    """A process that the server forked, with the methods of `subprocess.Popen` that the demo uses.

    ``answers``: where its exit code will come from; ``stdout``: what it prints.
    """

    def __init__(self, pid: int, answers: socket.socket, stdout: IO[str]) -> None:
        self.pid, self.stdout = pid, stdout
        self.returncode: int | None = None
        self._answers = answers

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit code, which is -N after signal N. Raises TimeoutExpired after ``timeout`` seconds."""
        if self.returncode is None:
            self._answers.settimeout(timeout)
            try:
                said = self._answers.recv(ANSWER)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0) from None
            # Nodes of a server that was killed kill themselves.
            self.returncode = int(said) if said else -signal.SIGKILL
            self._answers.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process is known to have ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask for the end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the process at once."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """A running `shoal.node.demo.fork_server`, which logs into ``folder``. ``env``: the nodes' environment, if not this one."""

    def __init__(self, folder: Path, env: Mapping[str, str] | None = None) -> None:
        self._log = folder / LOG
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.settimeout(READY_S)
        with theirs, self._log.open("a", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                # The folder says in a list of processes which demo this is.
                [*interpreter(), *PROGRAM, str(folder)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=env,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process id: that of the nodes' parent."""
        return self._process.pid

    def start(self, command: Sequence[str], log: IO[str], name: str) -> ForkedProcess:
        """Run ``python -m COMMAND`` in a fork called ``name``, with its stderr into ``log``. DemoError if it does not start."""
        answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        out, into = os.pipe()
        try:
            answers.settimeout(READY_S)
            request = json.dumps({"name": name, "command": list(command)}).encode()
            socket.send_fds(self._requests, [request], [into, log.fileno(), theirs.fileno()])
            theirs.close()
            if not (said := answers.recv(ANSWER)):
                raise OSError("it said nothing")
            return ForkedProcess(int(said), answers, os.fdopen(out, encoding="utf-8"))
        except OSError as error:
            answers.close()
            os.close(out)
            raise DemoError(f"The node {name} could not be started ({error}): {self._last_line(log)}") from error
        except BaseException:
            answers.close()
            os.close(out)
            raise
        finally:
            theirs.close()
            os.close(into)

    def _last_line(self, log: IO[str]) -> str:
        for path in (Path(log.name), self._log):
            if lines := path.read_text(encoding="utf-8", errors="replace").strip().splitlines():
                return lines[-1]
        return "the machine may be overloaded; try fewer --peers."

    def close(self) -> None:
        """End it."""
        self._requests.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_S)
