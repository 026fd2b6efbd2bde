"""A download on disk that may be broken off: ``header`` and ``chunks`` in a folder of its own, beside what it will become.

Nothing notes which chunks are there. Who goes on hashes what lies in the file, so a chunk that was half written, or changed since,
is fetched again.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor

from shoal.swarm.errors import MessageError
from shoal.swarm.state.snapshot import DIGEST, chunk_size, chunks_in
from shoal.swarm.wire.digest import CHUNK
from shoal.swarm.wire.member import pack, unpack
from shoal.swarm.wire.state import StateHeader

HEADER, CHUNKS = "header", "chunks"


class ResumableDownload:
    """A ``swarm.download.Sink`` for the first ``wanted`` bytes of a snapshot (rounded up to whole chunks), in ``folder``.

    Raises OSError where the disk does.
    """

    def __init__(self, folder: Path, header: StateHeader, digests: bytes, wanted: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if begun(folder) != header:
            clear(folder)
            folder.mkdir()
            (folder / HEADER).write_bytes(pack(header))
        self.path = folder / CHUNKS
        self._size = min(chunks_in(wanted) * CHUNK, header.nbytes)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            os.ftruncate(self._file, self._size)
            self._have = {chunk for chunk in range(chunks_in(wanted)) if self._right(chunk, header, digests)}
        except BaseException:
            os.close(self._file)
            raise

    def _right(self, chunk: int, header: StateHeader, digests: bytes) -> bool:
        data = os.pread(self._file, chunk_size(header.nbytes, chunk), chunk * CHUNK)
        return blake3(data).digest() == digests[chunk * DIGEST : (chunk + 1) * DIGEST]

    @property
    def have(self) -> set[int]:
        """The chunks that are there, and right."""
        return self._have

    def write(self, chunk: int, data: memoryview) -> None:
        """Put one into its place."""
        written = 0
        while written < len(data):
            written += os.pwrite(self._file, data[written:], chunk * CHUNK + written)
        self._have.add(chunk)

    def payload(self) -> Tensor:
        """What is there, uint8, as long as the file is: mapped, not read. Changes of it stay in memory."""
        return torch.from_file(str(self.path), shared=False, size=self._size, dtype=torch.uint8)

    def close(self) -> None:
        """Close the file, and keep it."""
        os.close(self._file)


def begun(folder: Path) -> StateHeader | None:
    """What was being downloaded into ``folder``; None if nothing was, or nobody can tell."""
    try:
        with (folder / HEADER).open("rb") as file:
            return unpack(file.read(StateHeader.LIMIT + 1), StateHeader)
    except (OSError, MessageError):
        return None


def clear(folder: Path) -> None:
    """Away with it."""
    shutil.rmtree(folder, ignore_errors=True)
