"""Files of any size as a stream of documents, read by line: .jsonl, .jsonl.gz, .txt.gz, plain text.

A document of a .jsonl file is one line's text; of other files, a few whole lines of about 4 KiB
together. At most one line of up to 16 MiB is held, so a small file that unpacks to a huge one costs
time but no memory. Longer lines, and those that are no record, are skipped and counted.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from shoal.node.data.sharding import assigned, is_in_shard
from shoal.node.data.source import DataError, Document, Place, Skipped, place_number, reason
from shoal.node.task import Shard

RECORDS = (".jsonl", ".jsonl.gz", ".txt.gz")
"""Files with these endings are streamed."""
MAX_LINE_BYTES = 16 * 2**20
PIECE_BYTES = 4096
"""Of a document of plain text, approximately."""
BLOCK_BYTES = 2**20
"""Read at a time of a line that is too long."""
BINARY_SAMPLE_BYTES = 1024
"""Of a file's beginning: with a zero byte among them it is no text."""
NAMED_FILES = 3
"""That a sentence about the source names."""

Line = tuple[int, int, bytes | None]
"""Offset in the unpacked file, number from 1, and bytes with the end of line; None where they are
too many.
"""


class RecordFiles:
    """`DocumentSource` of the documents in ``files``, (name, path) each.

    ``field``: of a record, that has the text.
    """

    def __init__(self, files: list[tuple[str, Path]], field: str, skipped: Skipped) -> None:
        self.files = files
        self.field = field
        self.skipped = skipped
        self.names = [name for name, _ in files]
        self.what = self._described()
        text = json.dumps(["files", field, self.names])
        self.identity = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    def _described(self) -> str:
        described = ", ".join(self.names[:NAMED_FILES])
        if len(self.names) > NAMED_FILES:
            described += f" and {len(self.names) - NAMED_FILES} more"
        if any(".jsonl" in name for name in self.names):
            described += f" (texts in the field {self.field!r})"
        return described

    def documents(
        self, shard: Shard, epoch: int, place: Place | None = None
    ) -> Iterator[tuple[Place, Document]]:
        """Implement `DocumentSource.documents`.

        A place is a file's number in the order of the epoch, and a line of it.
        """
        order = assigned(self.names, Shard(0, 1, shard.seed), epoch)
        first = place_number(place, "file")
        byte = place_number(place, "byte")
        number = place_number(place, "line")
        for at in range(first, len(order)):
            name, path = self.files[order[at]]
            read = self._records if name.endswith((".jsonl", ".jsonl.gz")) else self._pieces
            lines = _lines(path, byte, number or 1)
            for begin, line, document in read(name, lines, shard, epoch):
                yield {"file": at, "byte": begin, "line": line}, document
            byte = 0
            number = 0

    def _records(
        self, name: str, lines: Iterator[Line], shard: Shard, epoch: int
    ) -> Iterator[tuple[int, int, Document]]:
        """Yield the shard's documents, one a line, each with the offset and number of its line."""
        for begin, line, raw in lines:
            # A shard decodes its own lines alone.
            if not is_in_shard(shard, epoch, f"{name}:{line}"):
                continue
            if raw is None:
                self._skip_long(name, line)
                continue
            if not raw.strip():
                continue
            text = self._text(raw)
            if text is None:
                why = f"is no JSON object with a text in the field {self.field!r}"
                self.skipped.add(f"Line {line} of {name!r}", why)
            elif text:
                yield begin, line, Document(f"{name}:{line}", text)

    def _text(self, raw: bytes) -> bytes | None:
        """Return the text of a record; None if ``raw`` is none."""
        try:
            record = json.loads(raw)
        # Not JSON, not UTF-8, a number without end, or nested too deeply.
        except (ValueError, RecursionError):
            return None
        if not isinstance(record, dict):
            return None
        text = record.get(self.field)
        return text.encode("utf-8", "replace") if isinstance(text, str) else None

    def _pieces(
        self, name: str, lines: Iterator[Line], shard: Shard, epoch: int
    ) -> Iterator[tuple[int, int, Document]]:
        """Yield the shard's documents, a few lines each, each with the offset and number of its
        first line.
        """
        held: list[bytes] = []
        size = 0
        begin = 0
        first = 1
        for start, line, raw in lines:
            if start == 0 and raw is not None and b"\0" in raw[:BINARY_SAMPLE_BYTES]:
                return
            if raw is None:
                self._skip_long(name, line)
                continue
            if not held:
                begin = start
                first = line
            held.append(raw)
            size += len(raw)
            if size >= PIECE_BYTES:
                if is_in_shard(shard, epoch, f"{name}:{first}"):
                    yield begin, first, Document(f"{name}:{first}", b"".join(held))
                held = []
                size = 0
        rest = b"".join(held)
        if rest.strip() and is_in_shard(shard, epoch, f"{name}:{first}"):
            yield begin, first, Document(f"{name}:{first}", rest)

    def _skip_long(self, name: str, line: int) -> None:
        why = f"is longer than {MAX_LINE_BYTES // 2**20} MiB"
        self.skipped.add(f"Line {line} of {name!r}", why)


def _lines(path: Path, byte: int, number: int) -> Iterator[Line]:
    """Yield the lines from ``byte`` of the unpacked file on, where line ``number`` begins.

    Raises DataError.
    """
    try:
        with path.open("rb") as raw:
            file: IO[bytes] = raw
            if path.name.endswith(".gz"):
                file = gzip.GzipFile(fileobj=raw)  # type: ignore[assignment]
            # Beyond the end a packed file stops, but a plain one does not notice.
            is_beyond_end = file is raw and os.fstat(raw.fileno()).st_size < byte
            if file.seek(byte) != byte or is_beyond_end:
                raise DataError(
                    f"The file {str(path)!r} is shorter than it was when the checkpoint was saved: "
                    "give it back."
                )
            while line := file.readline(MAX_LINE_BYTES + 1):
                size = len(line)
                is_whole = line.endswith(b"\n")
                fits = is_whole or size <= MAX_LINE_BYTES
                while not is_whole and (more := file.readline(BLOCK_BYTES)):
                    size += len(more)
                    is_whole = more.endswith(b"\n")
                yield byte, number, line if fits else None
                byte += size
                number += 1
    except (OSError, EOFError, zlib.error) as error:
        remedy = "name a file that is whole"
        if isinstance(error, PermissionError):
            remedy = "check its permissions"
        raise DataError(
            f"Cannot read the text {str(path)!r} ({reason(error)}): {remedy}."
        ) from error
