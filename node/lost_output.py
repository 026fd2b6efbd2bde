"""Going on when nobody reads what a node prints.

What reads a node's output is not the node's: ``| head`` ends, ``| tee`` dies, an ssh session is
gone. From then on every write fails, and training goes on without.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any

READER_GONE = {errno.EPIPE, errno.EIO, errno.ENXIO}
"""What writing to a pipe or a terminal fails with."""
DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
"""What writing to a file fails with."""
STDERR = 2


class _Lasting(io.FileIO):
    """Descriptor of which nothing is written any more once its reader is gone, by this process or
    one that it starts.
    """

    lost = False

    def write(self, data: Any, /) -> int:
        """Write, or drop what nobody can read; results in a file on a full disk are missed,
        messages are not.
        """
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in READER_GONE:
                self.lost = True
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, self.fileno())
                os.close(null)
            elif error.errno not in {*DISK_FULL, errno.EFBIG} or self.fileno() != STDERR:
                raise
        return memoryview(data).nbytes


def drop_lost_output() -> None:
    """Let this process go on when the reader of its stdout or stderr is gone."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, name)
        # Else someone reads it in this process.
        is_own = old is getattr(sys, f"__{name}__")
        if not is_own or not isinstance(old, io.TextIOWrapper):
            continue
        raw = _Lasting(number, "wb", closefd=False)
        # It is unbuffered with PYTHONUNBUFFERED.
        is_unbuffered = isinstance(old.buffer, io.RawIOBase)
        buffer: Any = raw if is_unbuffered else io.BufferedWriter(raw)
        new = io.TextIOWrapper(
            buffer,
            old.encoding,
            old.errors,
            line_buffering=old.line_buffering,
            write_through=old.write_through,
        )
        setattr(sys, name, new)


def is_lost(stream: Any) -> bool:
    """Return whether the reader of ``stream`` is gone, as far as a write has shown."""
    buffer = getattr(stream, "buffer", None)
    return getattr(getattr(buffer, "raw", buffer), "lost", False) is True
