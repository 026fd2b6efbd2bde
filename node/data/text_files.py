"""Files that the option ``data`` names, in an order that all machines share."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from shoal.node.data.source import DataError
from shoal.node.home import expanded

MAX_FILES = 200_000
"""A folder with more is refused."""
NOT_LIBRARY = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "lib2to3",
    "idle_test",
    "__pycache__",
}
"""Folders of Python's library that are left out: its tests are absent on some systems, and packages
differ from machine to machine.
"""


def _walk(root: Path, skip: set[str], suffix: str) -> Iterator[tuple[str, Path]]:
    """Yield (name, path) of the regular files below ``root``, without hidden ones and links."""

    def fail(error: OSError) -> None:
        raise DataError(
            f"Cannot read the folder {error.filename!r} ({error.strerror}): check its permissions."
        )

    for folder, folders, files in os.walk(root, onerror=fail):
        folders[:] = sorted(f for f in folders if f not in skip and not f.startswith("."))
        for file in sorted(files):
            path = Path(folder, file)
            is_wanted = file.endswith(suffix) and not file.startswith(".")
            if is_wanted and path.is_file() and not path.is_symlink():
                yield path.relative_to(root).as_posix(), path


def find_files(data: str, at: Path | None = None) -> list[tuple[str, Path]]:
    """List (name, path) of all files that ``data`` names, sorted by name.

    ``data``: files and folders, separated by commas or as in PATH; empty: Python's own library.
    ``at``: the folder at which paths begin, by default the current one. Raises DataError.
    """
    at = at or Path.cwd()
    if not data.strip():
        return sorted(_walk(Path(sysconfig.get_paths()["stdlib"]), NOT_LIBRARY, ".py"))
    found: list[tuple[str, Path]] = []
    # An existing path is not split: a comma or colon may be part of its name.
    parts = [data] if os.path.exists(at / data) else re.split(f"[,{re.escape(os.pathsep)}]", data)
    for part in map(str.strip, parts):
        if not part:
            continue
        root = at / expanded(part)
        # Unlike Path.is_dir, os.path.isdir answers False where it may not look.
        if os.path.isdir(root):
            found.extend(islice(_walk(root, {"__pycache__"}, ""), MAX_FILES + 1))
        elif os.path.isfile(root):
            found.append((root.name, root))
        elif os.path.exists(root):
            raise DataError(
                f"The text {part!r} is neither a file nor a folder: name files or folders."
            )
        else:
            raise DataError(f"There is no text at {part!r}: name files or folders that exist.")
        if len(found) > MAX_FILES:
            raise DataError(
                f"There are more than {MAX_FILES} files below {part!r}: name a smaller folder."
            )
    return sorted(found)
