"""Text in memory, in an order that all machines share, or as a stream of records.

A document in memory is a file, or a piece of one if there are few files. Records and datasets are
streamed (`shoal.node.data.record_files`, `hub_dataset`).
"""

from __future__ import annotations

import codecs
import hashlib
import os
from pathlib import Path

from shoal.node.data.hub_dataset import HubDataset
from shoal.node.data.hub_name import PREFIX
from shoal.node.data.record_files import RECORDS, RecordFiles
from shoal.node.data.source import DataError, Document, DocumentSource, Skipped, no_document
from shoal.node.data.text_files import find_files
from shoal.node.task import Shard

FEW_FILES = 100
"""Fewer files than this are cut into about so many pieces, so that one file has several shards."""
EVERYTHING = Shard(0, 1, 0)
MIN_PIECE_BYTES = 256
BINARY_SAMPLE_BYTES = 1024
"""Of a file's beginning: with a zero byte among them it is no text."""


def open_stream(
    data: str, field: str, skipped: Skipped, at: Path | None = None
) -> DocumentSource | None:
    """Return the stream of documents that ``data`` names: a dataset (``hf:...``), or files of which
    at least one holds records.

    Returns None if all of it is plain text.

    Raises DataError: a path is missing, or a name is malformed.
    """
    if data.strip().startswith(PREFIX):
        return HubDataset(data.strip(), field, skipped)
    files = find_files(data, at)
    if any(name.endswith(RECORDS) for name, _ in files):
        return RecordFiles(files, field, skipped)
    return None


def read_documents(
    data: str, max_bytes: int, field: str = "text", at: Path | None = None
) -> list[Document]:
    """Read the text that ``data`` names (see ``TextTask``), at most ``max_bytes``, sorted by name.

    If there is more, the files with the lowest hashes of their names are read, a fair sample that
    is the same everywhere; of a stream, its first documents. Files that are not text (with a zero
    byte near their beginning) are left out.

    Raises DataError: a path is missing or unreadable, or there is no text at all.
    """
    source = open_stream(data, field, Skipped(), at)
    if source is None:
        documents = _read_files(data, max_bytes, at)
        if not documents:
            raise _no_text(data, at)
    else:
        documents = _read_stream(source, max_bytes)
        if not documents:
            raise no_document(source)
    if len(documents) < FEW_FILES:
        documents = _in_pieces(documents)
    return sorted(documents, key=lambda document: document.name)


def _in_pieces(documents: list[Document]) -> list[Document]:
    """Cut documents into about `FEW_FILES` pieces of equal size."""
    total = sum(len(document.content) for document in documents)
    size = max(MIN_PIECE_BYTES, total // FEW_FILES)
    pieces: list[Document] = []
    for document in documents:
        for start in range(0, len(document.content), size):
            name = f"{document.name}#{start // size}"
            pieces.append(Document(name, document.content[start : start + size]))
    return pieces


def _no_text(data: str, at: Path | None) -> DataError:
    wide = _wide_text(data, at)
    if wide is not None:
        return DataError(
            f"The text {str(wide)!r} is in UTF-16 or UTF-32: save it as UTF-8, such as with "
            "iconv -f UTF-16 -t UTF-8."
        )
    named = data or "the Python standard library"
    return DataError(f"There is no text in {named!r}: name text with --data.")


WIDE_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)
"""First bytes of such text; those of UTF-32 LE begin with those of UTF-16 LE."""


def _wide_text(data: str, at: Path | None) -> Path | None:
    """Return the first file of ``data`` that is text of two or four bytes a character, if any."""
    for _, path in find_files(data, at):
        with path.open("rb") as file:
            if file.read(4).startswith(WIDE_MARKS):
                return path
    return None


def _read_files(data: str, left: int, at: Path | None) -> list[Document]:
    documents: list[Document] = []
    for name, path in sorted(find_files(data, at), key=_hash_of_name):
        if left <= 0:
            break
        try:
            with path.open("rb") as file:
                content = file.read(left)
        except OSError as error:
            raise DataError(
                f"Cannot read the text {str(path)!r} ({error.strerror}): check its permissions."
            ) from error
        if content and b"\0" not in content[:BINARY_SAMPLE_BYTES]:
            documents.append(Document(name, content))
            left -= len(content)
    return documents


def _hash_of_name(file: tuple[str, Path]) -> bytes:
    return hashlib.sha256(os.fsencode(file[0])).digest()


def _read_stream(source: DocumentSource, left: int) -> list[Document]:
    documents: list[Document] = []
    for _, document in source.documents(EVERYTHING, 0):
        documents.append(Document(document.name, document.content[:left]))
        left -= len(documents[-1].content)
        if left <= 0:
            break
    return documents
