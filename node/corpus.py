"""Text files as documents: which files there are, read within a limit, in an order that all machines share."""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from swarm.errors import ShoalError

FEW_FILES = 100  # fewer files than this are cut into about so many pieces: else one file could not be shared out
MAX_FILES = 200_000
# Tests of the library repeat themselves and are absent on some systems; packages differ from machine to machine.
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "lib2to3", "idle_test", "__pycache__"}


class DataError(ShoalError):
    """The text cannot be read or does not suffice, or an option of the text task is out of range."""


@dataclass(frozen=True)
class Document:
    """A file or a piece of one. ``name`` is its path below the folder that was named, with ``/``."""

    name: str
    content: bytes


def _walk(root: Path, skip: set[str], suffix: str) -> Iterator[tuple[str, Path]]:
    """Yield (name, path) of the regular files below ``root``; hidden ones and links are left out."""

    def fail(error: OSError) -> None:
        raise DataError(f"Cannot read the folder {error.filename!r} ({error.strerror}): check its permissions.")

    for folder, folders, files in os.walk(root, onerror=fail):
        folders[:] = sorted(f for f in folders if f not in skip and not f.startswith("."))
        for file in sorted(files):
            path = Path(folder, file)
            if file.endswith(suffix) and not file.startswith(".") and path.is_file() and not path.is_symlink():
                yield path.relative_to(root).as_posix(), path


def _find(data: str) -> list[tuple[str, Path]]:
    """List (name, path) of all files, sorted by name."""
    if not data.strip():
        return sorted(_walk(Path(sysconfig.get_paths()["stdlib"]), NOT_LIBRARY, ".py"))
    found: list[tuple[str, Path]] = []
    # A path that exists is taken as it stands: a comma or colon may be part of its name.
    parts = [data] if os.path.exists(data) else re.split(f"[,{re.escape(os.pathsep)}]", data)
    for part in filter(None, (p.strip() for p in parts)):
        root = Path(os.path.expanduser(part))
        if os.path.isdir(root):  # unlike Path.is_dir, os.path answers False where it may not look
            found.extend(islice(_walk(root, {"__pycache__"}, ""), MAX_FILES + 1))
        elif os.path.isfile(root):
            found.append((root.name, root))
        elif os.path.exists(root):
            raise DataError(f"The text {part!r} is neither a file nor a folder: name files or folders.")
        else:
            raise DataError(f"There is no text at {part!r}: name files or folders that exist.")
        if len(found) > MAX_FILES:
            raise DataError(f"There are more than {MAX_FILES} files below {part!r}: name a smaller folder.")
    return sorted(found)


def read_documents(data: str, max_bytes: int) -> list[Document]:
    """Read the text that ``data`` names (see ``TextTask``), at most ``max_bytes``, sorted by name.

    Where there is more, the files with the lowest hashes of their names are taken, a fair sample that is the same
    everywhere. Files that are not text (with a zero byte near their beginning) are left out.

    Raises:
        DataError: a path is missing or unreadable, or there is no text at all.
    """
    documents: list[Document] = []
    left = max_bytes
    found = _find(data)
    for name, path in sorted(found, key=lambda f: hashlib.sha256(os.fsencode(f[0])).digest()):
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
    if not documents:
        raise DataError(f"There is no text in {data or 'the Python standard library'!r}: name text with --data.")
    if len(documents) < FEW_FILES:
        size = max(256, sum(len(d.content) for d in documents) // FEW_FILES)
        documents = [
            Document(f"{d.name}#{start // size}", d.content[start : start + size])
            for d in documents
            for start in range(0, len(d.content), size)
        ]
    return sorted(documents, key=lambda d: d.name)
