"""A guard that keeps the daemon from outliving its node: ``python -I -S daemon_guard.py RUN_DIR
NODE_PID COMMAND...``.

A node may end in ways that let it clean up nothing (kill -9, out of memory). So the daemon is a
child of this small process and not of the node; it ends the daemon and removes RUN_DIR as soon as
the node is gone, the daemon has ended, or it gets SIGTERM. It runs in a session of its own, so that
Ctrl-C in the terminal reaches the node alone, which may still need the daemon to leave the swarm.
On Linux the kernel also kills the daemon should this process itself be killed.

Standard library only, and nothing of ours: it starts in some 20 ms and holds a few MB.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys

POLL_S = 0.1  # between looks at the node
GRACE_S = 1.0  # seconds the daemon has to end by itself
_PR_SET_PDEATHSIG = 1  # Linux's prctl: "send me this signal when my parent is gone"


def _die_with_parent() -> None:
    """Ask the kernel to end this process with its parent; runs in the child before it becomes the
    daemon.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _stop(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _watch(child: subprocess.Popen[bytes], parent: int, stop: list[int], wake: int) -> None:
    """Return when the daemon has ended, the parent process is gone, or a signal asked for the
    end.
    """
    while child.poll() is None and os.getppid() == parent and not stop:
        if select.select([wake], [], [], POLL_S)[0]:
            os.read(wake, 64)


def main(run_dir: str, parent: int, command: list[str]) -> int:
    """Run ``command`` until it, or process ``parent``, ends; return its exit status."""
    with contextlib.suppress(OSError):
        os.setsid()  # fails when the caller made this process a session leader already
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    stop: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda n, _frame: stop.append(n))
    signal.signal(signal.SIGCHLD, lambda _n, _frame: None)  # so that the daemon's end wakes us
    child: subprocess.Popen[bytes] | None = None
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
        _watch(child, parent, stop, wake)
        return child.wait() if child.poll() is not None else 0
    except OSError as error:
        print(f"cannot run {command[0]}: [{error.errno}] {error.strerror}", flush=True)
        return 127
    finally:
        if child is not None and child.poll() is None:
            _stop(child)
        shutil.rmtree(run_dir, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]) & 0xFF)
