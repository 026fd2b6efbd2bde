"""Large snapshots on the disk: files without a name, and tensors mapped from them.

So serving weights takes no main memory beside the system's cache.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import overload

import torch
from torch import Tensor

from shoal.optim.codecs.base import Shape

SPOOLED_BYTES = 16 << 20  # from which on a snapshot is not held in memory
ON_DISK = Path("/var/tmp")  # the usual folder may lie in memory itself


class Spool:
    """File of ``nbytes`` bytes that is gone with the last that uses it.

    OSError if the disk has no room for it.
    """

    def __init__(self, nbytes: int) -> None:
        folder = ON_DISK if "TMPDIR" not in os.environ and os.access(ON_DISK, os.W_OK) else None
        # It is closed when it is gone.
        self._file = tempfile.TemporaryFile(  # noqa: SIM115
            prefix="shoal-", dir=folder, buffering=0
        )
        self.nbytes = nbytes
        os.posix_fallocate(self._file.fileno(), 0, nbytes)

    def write(self, offset: int, data: memoryview) -> None:
        """Write ``data`` at ``offset``. OSError if the disk fails."""
        written = 0
        while written < len(data):
            written += os.pwrite(self._file.fileno(), data[written:], offset + written)

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Return the bytes at ``offset``. OSError if the disk fails."""
        return memoryview(os.pread(self._file.fileno(), nbytes, offset))

    def mapped(self, offset: int, shape: Sequence[int]) -> Tensor:
        """Return float32 values at ``offset``, mapped rather than read, while the tensor is used;
        changes stay in memory.
        """
        count = math.prod(shape)
        before = offset % mmap.ALLOCATIONGRANULARITY
        if not count:
            return torch.empty(shape, device="cpu")
        pages = mmap.mmap(
            self._file.fileno(), before + 4 * count, access=mmap.ACCESS_COPY, offset=offset - before
        )
        return torch.frombuffer(pages, dtype=torch.float32, count=count, offset=before).view(shape)


class SpooledTensors(Sequence[Tensor]):
    """Float32 tensors of these ``shapes``, one behind the other from ``offset`` on, each mapped
    when it is taken.

    So a state that waits to be taken over, or is taken over tensor by tensor, takes no memory.
    """

    def __init__(self, spool: Spool, offset: int, shapes: Sequence[Shape]) -> None:
        self._spool = spool
        self._shapes = list(shapes)
        self._offsets = list(
            itertools.accumulate((4 * math.prod(shape) for shape in shapes), initial=offset)
        )

    def __len__(self) -> int:
        return len(self._shapes)

    @overload
    def __getitem__(self, place: int) -> Tensor: ...
    @overload
    def __getitem__(self, place: slice) -> list[Tensor]: ...
    def __getitem__(self, place: int | slice) -> Tensor | list[Tensor]:
        if isinstance(place, slice):
            return [self[number] for number in range(len(self))[place]]
        return self._spool.mapped(self._offsets[range(len(self))[place]], self._shapes[place])


def spool_for(nbytes: int) -> Spool | None:
    """Return a file for a snapshot; None if it is to be in memory: it is small, or no disk takes
    it.
    """
    try:
        return Spool(nbytes) if nbytes >= SPOOLED_BYTES and hasattr(os, "posix_fallocate") else None
    except OSError:
        return None
