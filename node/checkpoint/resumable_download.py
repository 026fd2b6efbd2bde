"""A download on disk that can be interrupted and resumed: files ``header`` and ``chunks`` in a folder of its own.

No record is kept of the chunks that are there. A resumed download hashes what is in the file, so a chunk that is half written or
has changed is fetched again.
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
from shoal.swarm.wire.envelope import pack, unpack
from shoal.swarm.wire.state import StateHeader

HEADER, CHUNKS = "header", "chunks"


class ResumableDownload:
    """A `ChunkSink` for the first ``wanted`` bytes of a snapshot, rounded up to whole chunks, in ``folder``.

    Its methods raise OSError when the disk fails.
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
        """Chunks that are here and verified."""
        return self._have

    def write(self, chunk: int, data: memoryview) -> None:
        """Write one chunk into its place."""
        written = 0
        while written < len(data):
            written += os.pwrite(self._file, data[written:], chunk * CHUNK + written)
        self._have.add(chunk)

    def payload(self) -> Tensor:
        """Return the file's bytes (uint8), mapped rather than read. Changes stay in memory."""
        return torch.from_file(str(self.path), shared=False, size=self._size, dtype=torch.uint8)

    def close(self) -> None:
        """Close the file, and keep it."""
        os.close(self._file)


def begun(folder: Path) -> StateHeader | None:
    """Return the header of the unfinished download in ``folder``; None if there is none, or it is unreadable."""
    try:
        with (folder / HEADER).open("rb") as file:
            return unpack(file.read(StateHeader.LIMIT + 1), StateHeader)
    except (OSError, MessageError):
        return None


def clear(folder: Path) -> None:
    """Delete the folder of an unfinished download."""
    shutil.rmtree(folder, ignore_errors=True)
