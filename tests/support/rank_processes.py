"""The process of a rank that a command has started."""

from contextlib import suppress

import psutil


def rank_of(process, rank):
    """The process of a rank that a command has started."""
    for child in psutil.Process(process.popen.pid).children():
        with suppress(psutil.Error):  # it has just ended
            if child.environ().get("RANK") == str(rank):
                return child.pid
    return None
