"""Processes that a `tests.support.fork_server` forks: how tests start it, and what they know of
each process.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from shoal.node.demo.nodes import interpreter

PROGRAM = ("-m", "tests.support.fork_server")
LOG = "fork-server.log"
READY_S = 120.0  # seconds for the server to import everything, on a busy machine, and to fork
END_S = 5.0
ANSWER = 32  # bytes of a process id, or an exit code


class ForkedProcess:
    """A process that the server forked, with the methods of `subprocess.Popen` that the tests use.

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
        """Wait for the end; return the exit code, which is -N after signal N.

        Raises TimeoutExpired after ``timeout`` seconds.
        """
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
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """A running `tests.support.fork_server`, which logs into ``folder``.

    ``env``: the nodes' environment, if not this one.
    """

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
        self.pid = self._process.pid

    def start(self, command: Sequence[str], log: IO[str], name: str) -> ForkedProcess:
        """Run ``python -m COMMAND`` in a fork called ``name``, with its stderr into ``log``.

        RuntimeError if it does not start.
        """
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
        except BaseException as error:
            answers.close()
            os.close(out)
            if isinstance(error, OSError):
                raise RuntimeError(
                    f"The node {name} could not be started ({error}): {self._last_line(log)}"
                ) from error
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
        self._requests.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_S)
