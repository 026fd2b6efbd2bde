"""Large snapshots lie in files without a name, so that handing weights out takes no main memory beside the system's cache."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

LARGE = 16 << 20  # bytes from which on a snapshot is not held in memory
ON_DISK = Path("/var/tmp")  # the usual folder may lie in memory itself


class Spool:
    """File of ``nbytes`` bytes that is gone with the last that uses it. OSError if the disk has no room for it."""

    def __init__(self, nbytes: int) -> None:
        folder = ON_DISK if "TMPDIR" not in os.environ and os.access(ON_DISK, os.W_OK) else None
        self._file, self.nbytes = tempfile.TemporaryFile(prefix="shoal-", dir=folder, buffering=0), nbytes  # noqa: SIM115 (it is closed when it is gone)
        os.posix_fallocate(self._file.fileno(), 0, nbytes)

    def write(self, offset: int, data: memoryview) -> None:
        """Write ``data`` at ``offset``. OSError if the disk fails."""
        written = 0
        while written < len(data):
            written += os.pwrite(self._file.fileno(), data[written:], offset + written)

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Return the bytes at ``offset``. OSError if the disk fails."""
        return memoryview(os.pread(self._file.fileno(), nbytes, offset))

    def mapped(self) -> Tensor:
        """Return all bytes (uint8), mapped rather than read; changes stay in memory."""
        return torch.frombuffer(mmap.mmap(self._file.fileno(), self.nbytes, access=mmap.ACCESS_COPY), dtype=torch.uint8)


def spool_for(nbytes: int) -> Spool | None:
    """Return a file for a snapshot; None if it is to be in memory: it is small, or no disk takes it."""
    try:
        return Spool(nbytes) if nbytes >= LARGE and hasattr(os, "posix_fallocate") else None
    except OSError:
        return None
