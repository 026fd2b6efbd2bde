"""Waiting in a test for what happens by itself."""

import threading
import time

LIMIT_S = 240.0
"""A net for what hangs, below the 300 s of a whole test: how long a start or a run takes says how
busy the machine is.
"""


def until(condition, seconds=LIMIT_S, what="it"):
    """Poll ``condition`` until it is true; return what it returned."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"{what} did not happen within {seconds:g} s"
        threading.Event().wait(0.01)
    return value
