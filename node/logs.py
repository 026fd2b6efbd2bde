"""The set-up of what a process writes for people: logging, and streams of which the reader may go.

What reads a node's output is not the node's: ``| head`` ends, ``| tee`` dies, an ssh session is gone. From then on every write
fails, and training goes on without.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
from typing import Any

_GONE = {errno.EPIPE, errno.EIO, errno.ENXIO}  # of a pipe, and of a terminal
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class _Lasting(io.FileIO):
    """Descriptor of which nothing is written any more once its reader is gone, by this process or one that it starts."""

    lost = False

    def write(self, data: Any, /) -> int:
        """Write, or drop what nobody can read; results in a file on a full disk are missed, messages are not."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in _GONE:
                self.lost = True
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, self.fileno())
                os.close(null)
            elif error.errno not in _FULL or self.fileno() != 2:
                raise
        return memoryview(data).nbytes


def drop_lost_output() -> None:
    """Let this process go on when the reader of its stdout or stderr is gone."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, name)
        if isinstance(old, io.TextIOWrapper) and old is getattr(sys, f"__{name}__"):  # else someone reads it in this process
            raw = _Lasting(number, "wb", closefd=False)
            buffer: Any = raw if isinstance(old.buffer, io.RawIOBase) else io.BufferedWriter(raw)  # raw: PYTHONUNBUFFERED
            new = io.TextIOWrapper(
                buffer, old.encoding, old.errors, line_buffering=old.line_buffering, write_through=old.write_through
            )
            setattr(sys, name, new)


def is_lost(stream: Any) -> bool:
    """Return whether the reader of ``stream`` is gone, as far as a write has shown."""
    buffer = getattr(stream, "buffer", None)
    return getattr(getattr(buffer, "raw", buffer), "lost", False) is True


def log_to_stderr(verbose: bool) -> None:
    """Log to stderr, for as long as the process lives."""
    # Warnings of shoal are for the user; the rest, and what libraries log, come only with --verbose.
    level = logging.WARNING if verbose else logging.ERROR
    logging.basicConfig(stream=sys.stderr, level=level, format="%(levelname)s %(name)s: %(message)s", force=True)
    logging.getLogger("shoal").setLevel(logging.DEBUG if verbose else logging.WARNING)
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "WARNING" if verbose else "ERROR")
