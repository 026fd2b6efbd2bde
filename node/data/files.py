"""Files that ``data`` names, in an order that all machines share."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from shoal.node.data.errors import DataError

MAX_FILES = 200_000
# Tests of the library repeat themselves and are absent on some systems; packages differ from machine to machine.
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "lib2to3", "idle_test", "__pycache__"}


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


def find_files(data: str, at: Path | None = None) -> list[tuple[str, Path]]:
    """List (name, path) of all files that ``data`` names, sorted by name; by default Python's library. DataError.

    Paths begin at the folder ``at``, by default the current one.
    """
    at = at or Path.cwd()
    if not data.strip():
        return sorted(_walk(Path(sysconfig.get_paths()["stdlib"]), NOT_LIBRARY, ".py"))
    found: list[tuple[str, Path]] = []
    # An existing path is not split: a comma or colon may be part of its name.
    parts = [data] if os.path.exists(at / data) else re.split(f"[,{re.escape(os.pathsep)}]", data)
    for part in filter(None, (p.strip() for p in parts)):
        root = at / os.path.expanduser(part)
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
