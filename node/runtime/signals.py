"""Ctrl-C, SIGTERM and the end of the terminal: the first asks for an orderly end, a second one ends the process at once.

A closed terminal sends SIGHUP, often twice, and every write to it fails from then on. So SIGHUP only ever asks, and what would be
written there is dropped. Who started the process with ``nohup`` wants none of that, and SIGHUP stays ignored.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from shoal.node.exit_codes import ExitCode


def handle_all(handler: Callable[[int, FrameType | None], None]) -> None:
    """Handle SIGINT, SIGTERM and SIGHUP by ``handler`` from now on; for the main thread."""
    terminals = [fd for fd in (0, 1, 2) if os.isatty(fd)]

    def hung_up(number: int, frame: FrameType | None) -> None:
        null = os.open(os.devnull, os.O_RDWR)
        for fd in terminals:
            os.dup2(null, fd)
        os.close(null)
        handler(number, frame)

    signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGTERM, handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, hung_up)


class ShutdownSignals:
    """The handler of SIGINT, SIGTERM and SIGHUP; ``requested`` is True once one of them came.

    Until ``orderly`` is called there is nothing to drain, and the first signal raises KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.requested = False
        self._orderly: Callable[[], None] | None = None

    def install(self) -> None:
        """Handle the signals from now on; for the main thread."""
        handle_all(self._handle)

    def orderly(self, on_request: Callable[[], None]) -> None:
        """Call ``on_request`` at the first signal from now on, in the signal handler: it must be short."""
        self._orderly = on_request

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            if number == signal.SIGHUP:
                return
            # The guard ends the daemon and removes its sockets when this process is gone.
            os._exit(ExitCode.INTERRUPTED)
        self.requested = True
        if self._orderly is None:
            raise KeyboardInterrupt
        self._orderly()


def end_with_parent(parent: int, poll_s: float = 0.5) -> None:
    """End this process at once when ``parent`` is no longer its parent: a demo that was killed leaves no nodes."""

    def watch() -> None:
        never = threading.Event()
        while os.getppid() == parent:
            never.wait(poll_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="shoal-parent-watch", daemon=True).start()
