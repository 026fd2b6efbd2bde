"""Files of any size as a stream of documents, read by line: .jsonl, .jsonl.gz, .txt.gz, and plain text.

A document of a .jsonl file is one line's text; of other files, a few whole lines of about 4 KiB together. At most one line of up to
16 MiB is held, so a small file that unpacks to a huge one costs time but no memory. Longer lines, and those that are no record, are
skipped and counted.
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

from shoal.node.data.dealing import belongs, dealt
from shoal.node.data.errors import DataError, reason
from shoal.node.data.source import Document, Place, Skipped, place_number
from shoal.node.task import Shard

RECORDS = (".jsonl", ".jsonl.gz", ".txt.gz")
"""Files with these endings are streamed."""
MAX_LINE = 16 * 2**20
PIECE = 4096  # approximate bytes of a document of plain text
_BLOCK = 2**20

Line = tuple[int, int, bytes | None]
"""Offset in the unpacked file, number from 1, and bytes with the end of line; None where they are too many."""


class RecordFiles:
    """`Source` of the documents in ``files``, (name, path) each; ``field``: the field of a record's text."""

    def __init__(self, files: list[tuple[str, Path]], field: str, skipped: Skipped) -> None:
        self.files, self.field, self.skipped = files, field, skipped
        self.names = [name for name, _ in files]
        named = ", ".join(self.names[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
        self.what = f"{named} (texts in the field {field!r})" if any(".jsonl" in name for name in self.names) else named
        text = json.dumps(["files", field, self.names])
        self.identity = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    def documents(self, shard: Shard, epoch: int, place: Place | None = None) -> Iterator[tuple[Place, Document]]:
        """Implement `Source.documents`. A place is a file's number in the order of the epoch, and a line of it."""
        order = dealt(self.names, Shard(0, 1, shard.seed), epoch)
        first, byte, number = place_number(place, "file"), place_number(place, "byte"), place_number(place, "line")
        for at in range(first, len(order)):
            name, path = self.files[order[at]]
            read = self._records if name.endswith((".jsonl", ".jsonl.gz")) else self._pieces
            for begin, line, document in read(name, path, byte, number or 1, shard, epoch):
                yield {"file": at, "byte": begin, "line": line}, document
            byte = number = 0

    def _records(
        self, name: str, path: Path, byte: int, number: int, shard: Shard, epoch: int
    ) -> Iterator[tuple[int, int, Document]]:
        for begin, line, raw in _lines(path, byte, number):
            # A shard decodes its own lines alone.
            if not belongs(shard, epoch, f"{name}:{line}"):
                continue
            if raw is None:
                self.skipped.add(f"Line {line} of {name!r}", f"is longer than {MAX_LINE // 2**20} MiB")
            elif raw.strip():
                text = self._text(raw)
                if text is None:
                    self.skipped.add(f"Line {line} of {name!r}", f"is no JSON object with a text in the field {self.field!r}")
                elif text:
                    yield begin, line, Document(f"{name}:{line}", text)

    def _text(self, raw: bytes) -> bytes | None:
        try:
            record = json.loads(raw)
        except (ValueError, RecursionError):  # not JSON, not UTF-8, a number without end, or nested too deeply
            return None
        text = record.get(self.field) if isinstance(record, dict) else None
        return text.encode("utf-8", "replace") if isinstance(text, str) else None

    def _pieces(
        self, name: str, path: Path, byte: int, number: int, shard: Shard, epoch: int
    ) -> Iterator[tuple[int, int, Document]]:
        held: list[bytes] = []
        size, begin, first = 0, byte, number
        for start, line, raw in _lines(path, byte, number):
            if start == 0 and raw is not None and b"\0" in raw[:1024]:
                return  # no text
            if raw is None:
                self.skipped.add(f"Line {line} of {name!r}", f"is longer than {MAX_LINE // 2**20} MiB")
                continue
            if not held:
                begin, first = start, line
            held.append(raw)
            size += len(raw)
            if size >= PIECE:
                if belongs(shard, epoch, f"{name}:{first}"):
                    yield begin, first, Document(f"{name}:{first}", b"".join(held))
                held, size = [], 0
        if b"".join(held).strip() and belongs(shard, epoch, f"{name}:{first}"):
            yield begin, first, Document(f"{name}:{first}", b"".join(held))


def _lines(path: Path, byte: int, number: int) -> Iterator[Line]:
    """Yield the lines from ``byte`` of the unpacked file on, where line ``number`` begins. DataError."""
    try:
        with path.open("rb") as raw:
            file: IO[bytes] = gzip.GzipFile(fileobj=raw) if path.name.endswith(".gz") else raw  # type: ignore[assignment]
            # Beyond the end a packed file stops, but a plain one does not notice.
            if file.seek(byte) != byte or (file is raw and os.fstat(raw.fileno()).st_size < byte):
                raise DataError(f"The file {str(path)!r} is shorter than it was when the checkpoint was saved: give it back.")
            while line := file.readline(MAX_LINE + 1):
                size, whole = len(line), line.endswith(b"\n")
                fits = whole or size <= MAX_LINE
                while not whole and (more := file.readline(_BLOCK)):
                    size, whole = size + len(more), more.endswith(b"\n")
                yield byte, number, line if fits else None
                byte, number = byte + size, number + 1
    except (OSError, EOFError, zlib.error) as error:
        todo = "check its permissions" if isinstance(error, PermissionError) else "name a file that is whole"
        raise DataError(f"Cannot read the text {str(path)!r} ({reason(error)}): {todo}.") from error
