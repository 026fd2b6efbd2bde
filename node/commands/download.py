"""Download of a swarm's weights into a folder: it can be interrupted, and goes on later.

The files ``header`` and ``chunks`` lie in a folder of the download's own. No record is kept of the
chunks that are there: a resumed download hashes what is in the file, so a chunk that is half
written or has changed is fetched again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor

from shoal.optim.codecs.floats import FLOAT32
from shoal.swarm.errors import MessageError, NetworkError, ShoalError
from shoal.swarm.exchange.contribution import Outline, outline_digest
from shoal.swarm.p2p.host import Host
from shoal.swarm.p2p.stream import short
from shoal.swarm.state.download import Peer
from shoal.swarm.state.progress import FetchProgress, while_it_moves
from shoal.swarm.state.query import ModelDiffersError, StateQuery
from shoal.swarm.state.snapshot import DIGEST_BYTES, chunk_size, chunks_in
from shoal.swarm.state.sync import fetch_into, wait_for
from shoal.swarm.wire.envelope import CHUNK, MAX_EXTRA, pack, unpack, unpack_names
from shoal.swarm.wire.messages import StateHeader

HEADER = "header"
CHUNKS = "chunks"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Types that the parameters of a swarm's model may have."""

log = logging.getLogger(__name__)


class PullError(ShoalError):
    """The swarm has nothing to pull, or this machine has no place for it."""


class ResumableDownload:
    """A `ChunkSink` for the first ``wanted`` bytes of a snapshot, rounded up to whole chunks, in
    ``folder``.

    Its methods raise OSError when the disk fails.
    """

    def __init__(self, folder: Path, header: StateHeader, digests: bytes, wanted: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if begun_download(folder) != header:
            clear_download(folder)
            folder.mkdir()
            (folder / HEADER).write_bytes(pack(header))
        self.path = folder / CHUNKS
        self._size = min(chunks_in(wanted) * CHUNK, header.nbytes)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            os.ftruncate(self._file, self._size)
            self.have = {
                chunk for chunk in range(chunks_in(wanted)) if self._right(chunk, header, digests)
            }
        except BaseException:
            os.close(self._file)
            raise

    def _right(self, chunk: int, header: StateHeader, digests: bytes) -> bool:
        data = os.pread(self._file, chunk_size(header.nbytes, chunk), chunk * CHUNK)
        return blake3(data).digest() == digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]

    def write(self, chunk: int, data: memoryview) -> None:
        written = 0
        while written < len(data):
            written += os.pwrite(self._file, data[written:], chunk * CHUNK + written)
        self.have.add(chunk)

    def payload(self) -> Tensor:
        """Return the file's bytes (uint8), mapped rather than read. Changes stay in memory."""
        return torch.from_file(str(self.path), shared=False, size=self._size, dtype=torch.uint8)

    def close(self) -> None:
        os.close(self._file)


def begun_download(folder: Path) -> StateHeader | None:
    """Return the header of the unfinished download in ``folder``; None if there is none, or it is
    unreadable.
    """
    try:
        with (folder / HEADER).open("rb") as file:
            return unpack(file.read(StateHeader.LIMIT + 1), StateHeader)
    except (OSError, MessageError):
        return None


def clear_download(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class WeightsQuery(StateQuery):
    """Query for the slow weights alone, checked against the manifest where the shapes are not known
    here, and bounded in size.
    """

    known: bool
    cap: int

    def check(self, peer: str, header: StateHeader) -> None:
        theirs = Outline(unpack_names(header.names), header.shapes)
        if self.known:
            own = Outline(tuple(self.names), tuple(self.shapes))
            difference = own.differs(theirs)
            if difference is not None:
                raise ModelDiffersError(
                    f"The model here is not that of peer {short(peer)}: {difference}."
                )
        elif len(theirs.names) != len(theirs.shapes) or not any(
            outline_digest(theirs, [dtype] * len(theirs.shapes)) == self.request.model
            for dtype in DTYPES
        ):
            raise PullError(
                f"The names and shapes that peer {short(peer)} offers cannot be checked against "
                "the swarm's manifest: name your copy of the task with --task."
            )
        need = self.wanted(header)
        if header.dtype != "float32" or not need <= header.nbytes <= need * (1 + MAX_EXTRA):
            raise MessageError(
                f"peer {short(peer)} offers {header.nbytes} bytes where the model has {need}."
            )
        if need > self.cap:
            raise PullError(
                f"The weights have {need:,} bytes and at most {self.cap:,} may come: allow more "
                "with --max-bytes, or free some space."
            )

    def wanted(self, header: StateHeader) -> int:
        return FLOAT32.nbytes(header.shapes)


class _SinksOnDisk:
    """Sink factory that keeps an unfinished download in ``folder``. ``files`` closes what it
    opens.
    """

    def __init__(self, folder: Path, files: ExitStack) -> None:
        self._folder = folder
        self._files = files

    def unfinished(self) -> StateHeader | None:
        return begun_download(self._folder)

    async def open(self, header: StateHeader, digests: bytes) -> ResumableDownload:
        need = FLOAT32.nbytes(header.shapes)
        loop = asyncio.get_running_loop()
        kept = await loop.run_in_executor(
            None, ResumableDownload, self._folder, header, digests, need
        )
        self._files.callback(kept.close)
        log.info("%d of %d chunks were here before", len(kept.have), chunks_in(need))
        return kept

    async def finish(
        self, header: StateHeader, digests: bytes, sink: ResumableDownload
    ) -> tuple[StateHeader, ResumableDownload]:
        return header, sink


def download(
    host: Host,
    query: StateQuery,
    sources: Sequence[Peer],
    folder: Path,
    say: Callable[[str], None],
) -> tuple[StateHeader, list[Tensor]]:
    """Fetch a snapshot by way of a file in ``folder``; return its header, and its slow weights
    mapped from the file.

    ``say`` is told how far it is.

    Raises:
        NetworkError, PullError, ModelDiffersError; OSError of the disk.
    """
    with ExitStack() as files:
        progress = FetchProgress()
        fetch = fetch_into(host, query, sources, _SinksOnDisk(folder, files), progress)
        fetched = wait_for(host.submit(while_it_moves(fetch, progress)), progress, say)
        if fetched is None:
            raise NetworkError(
                "all peers that were asked for weights refused, or are gone: try again."
            )
        header, kept = fetched
        weights = kept.payload()[: FLOAT32.nbytes(header.shapes)]
        return header, FLOAT32.decode(weights, header.shapes)
