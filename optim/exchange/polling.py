"""Pauses between two polls of a store or of gloo, neither of which wakes who waits."""

from __future__ import annotations

import threading
import time

FIRST_PAUSE_S = 0.0005
"""Seconds of the first pause between two polls; each further one is half as long again."""
LONGEST_PAUSE_S = 0.02
"""Seconds of a pause, at most."""


class Pause:
    """Waiting time between two polls, longer each time; ends early when ``closed`` is set."""

    def __init__(self, closed: threading.Event) -> None:
        self._closed = closed
        self._seconds = FIRST_PAUSE_S

    def __call__(self) -> None:
        if self._closed.is_set():
            time.sleep(self._seconds)  # without it the caller would poll in a busy loop
        else:
            self._closed.wait(self._seconds)
        self._seconds = min(1.5 * self._seconds, LONGEST_PAUSE_S)
