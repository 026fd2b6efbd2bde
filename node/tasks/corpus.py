"""Text in memory, within a limit and in an order that all machines share, or as a stream where there are records."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from shoal.node.data.errors import DataError
from shoal.node.data.files import find_files
from shoal.node.data.hub import PREFIX, HubDataset
from shoal.node.data.record_files import RECORDS, RecordFiles
from shoal.node.data.source import Document, DocumentSource, Skipped, no_document
from shoal.node.task import Shard

__all__ = ["FEW_FILES", "DataError", "Document", "open_stream", "read_documents"]

FEW_FILES = 100  # fewer files than this are cut into about so many pieces, so that one file can be shared out
EVERYTHING = Shard(0, 1, 0)


def open_stream(data: str, field: str, skipped: Skipped, at: Path | None = None) -> DocumentSource | None:
    """Return the stream of documents that ``data`` names: a dataset (``hf:...``), or files of which at least one holds records.

    Returns None if all of it is plain text.

    Raises DataError: a path is missing, or a name is malformed.
    """
    if data.strip().startswith(PREFIX):
        return HubDataset(data.strip(), field, skipped)
    files = find_files(data, at)
    return RecordFiles(files, field, skipped) if any(name.endswith(RECORDS) for name, _ in files) else None


def read_documents(data: str, max_bytes: int, field: str = "text", at: Path | None = None) -> list[Document]:
    """Read the text that ``data`` names (see ``TextTask``), at most ``max_bytes``, sorted by name.

    If there is more, the files with the lowest hashes of their names are read, a fair sample that is the same everywhere; of a
    stream, its first documents. Files that are not text (with a zero byte near their beginning) are left out.

    Raises DataError: a path is missing or unreadable, or there is no text at all.
    """
    source = open_stream(data, field, Skipped(), at)
    documents = _read_files(data, max_bytes, at) if source is None else _read_stream(source, max_bytes)
    if not documents:
        if source is not None:
            raise no_document(source)
        raise DataError(f"There is no text in {data or 'the Python standard library'!r}: name text with --data.")
    if len(documents) < FEW_FILES:
        size = max(256, sum(len(d.content) for d in documents) // FEW_FILES)
        documents = [
            Document(f"{d.name}#{start // size}", d.content[start : start + size])
            for d in documents
            for start in range(0, len(d.content), size)
        ]
    return sorted(documents, key=lambda d: d.name)


def _read_files(data: str, left: int, at: Path | None) -> list[Document]:
    documents: list[Document] = []
    for name, path in sorted(find_files(data, at), key=lambda f: hashlib.sha256(os.fsencode(f[0])).digest()):
        if left <= 0:
            break
        try:
            with path.open("rb") as file:
                content = file.read(left)
        except OSError as error:
            raise DataError(f"Cannot read the text {str(path)!r} ({error.strerror}): check its permissions.") from error
        if content and b"\0" not in content[:1024]:
            documents.append(Document(name, content))
            left -= len(content)
    return documents


def _read_stream(source: DocumentSource, left: int) -> list[Document]:
    documents: list[Document] = []
    for _, document in source.documents(EVERYTHING, 0):
        documents.append(Document(document.name, document.content[:left]))
        left -= len(documents[-1].content)
        if left <= 0:
            break
    return documents
