"""A process that has imported what every node imports, and forks nodes for tests: ``python -m
tests.support.fork_server FOLDER < SOCKET``.

To import torch and all that trains takes two seconds of a processor and 150 MB. Here that is done
once, and what was imported is shared by all forks (copy-on-write; `gc.freeze` keeps the collector
from touching it). A fork then does what ``python -m MODULE ARGUMENTS`` does: it has a session,
signal handlers, output and exit code of its own.

What has begun before a fork would be shared too, so nothing has: no module of a user's is imported,
no device is looked for, no torch operation runs, and there is no thread, but for those of numpy's
OpenBLAS, which ends them at a fork by itself.

`tests.support.forked` has the other end of the socket. When it is closed, which the death of the
tests does too, this process ends, and its nodes find that their parent is gone (``--with-parent``).
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from contextlib import suppress
from types import FrameType

from shoal.node.packages import uncollected

COMMANDS = "shoal.node.cli.main"  # which the nodes run, by its name; nothing here depends on it
REQUEST = 1 << 17  # bytes of a request: a name, a module and its arguments


def import_all() -> None:
    """Import what every node imports sooner or later, except a task of the user's own."""
    with uncollected():
        # A process's first optimizer of torch imports this, which takes a second of a processor.
        import torch._dynamo  # noqa: F401

        import shoal.node.runtime.display
        import shoal.node.runtime.node_run
        import shoal.node.runtime.training_node
        import shoal.swarm.p2p.hivemind_adapter  # noqa: F401

        importlib.import_module(COMMANDS)


class ForkServer:
    """Forks a node for each request that comes through ``requests``, and sends its process id and
    then its exit code back.
    """

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._running: dict[int, socket.socket] = {}
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._waker, False)

    def serve(self) -> list[str]:
        """Return, in each fork, the module and the arguments that it is to run; end this process
        when the demo is gone.
        """
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _look)
        while True:
            ready, _, _ = select.select([requests := self._requests.fileno(), self._wake], [], [])
            if self._wake in ready:
                os.read(self._wake, 64)
                self._report_ended()
            if requests in ready and (command := self._fork()) is not None:
                return command

    def _report_ended(self) -> None:
        while self._running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            with self._running.pop(pid) as asker, suppress(OSError):  # the demo is gone
                asker.send(str(os.waitstatus_to_exitcode(status)).encode())

    def _fork(self) -> list[str] | None:
        """Fork as the next request has it; return the command in the fork, and None in the
        parent.
        """
        data, descriptors, _, _ = socket.recv_fds(self._requests, REQUEST, 3)
        if not data:
            os._exit(0)
        out, log, answers = descriptors
        asker = socket.socket(fileno=answers)
        try:
            pid = os.fork()
        except OSError as error:
            os.write(
                log,
                f"Error: This machine starts no more processes ({error.strerror}): try fewer "
                "--peers.\n".encode(),
            )
            asker.close()
            pid = -1
        if pid == 0:
            asker.close()
            self._become_a_process_of_its_own(out, log)
        os.close(out)
        os.close(log)
        if pid == 0:
            request = json.loads(data)
            _name(request["name"])
            return list(request["command"])
        if pid > 0:
            self._running[pid] = asker
            with suppress(OSError):
                asker.send(str(pid).encode())
        return None

    def _become_a_process_of_its_own(self, out: int, log: int) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()  # Ctrl-C is for the demo, which then ends its nodes orderly
        os.dup2(out, 1)
        os.dup2(log, 2)
        # Closed as objects too: the numbers will be others' descriptors.
        for each in (self._requests, *self._running.values()):
            each.close()
        os.close(self._wake)
        os.close(self._waker)
        if (
            "numpy.random" in sys.modules
        ):  # Python's own is seeded again by itself, torch's has the same seed in every process
            sys.modules["numpy.random"].seed()


def _look(number: int, frame: FrameType | None) -> None:
    """Handle SIGCHLD: that there is a handler makes the signal wake `ForkServer.serve`."""


def _name(name: str) -> None:
    """Show ``name`` in the lists of ``top`` and ``ps``, where all forks have the command line of
    their server.
    """
    with suppress(OSError), open("/proc/self/comm", "wb") as file:
        file.write(f"shoal {name}".encode()[:15])


def main() -> None:
    """Serve; in a fork, be its node from start to end."""
    requests = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    import_all()
    module, *sys.argv[1:] = ForkServer(requests).serve()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
