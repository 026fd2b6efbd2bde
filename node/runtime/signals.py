"""Ctrl-C and SIGTERM: the first asks for an orderly end, the second ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from shoal.node.exit_codes import ExitCode


class ShutdownSignals:
    """The handler of SIGINT and SIGTERM; ``requested`` is True once one of them came.

    Until ``orderly`` is called there is nothing to drain, and the first signal raises KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.requested = False
        self._orderly: Callable[[], None] | None = None

    def install(self) -> None:
        """Handle SIGINT and SIGTERM from now on; for the main thread."""
        signal.signal(signal.SIGINT, self._handle)
        signal.signal(signal.SIGTERM, self._handle)

    def orderly(self, on_request: Callable[[], None]) -> None:
        """Call ``on_request`` at the first signal from now on, in the signal handler: it must be short."""
        self._orderly = on_request

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
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
