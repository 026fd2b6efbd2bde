"""The temporary folder of a demo. One that was killed leaves its folder to the next demo, which removes what is provably dead."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shoal.swarm.file_lock import FileLock, InUseError

PREFIX, LOCK = "shoal-", ".lock"
REMEDY = "start again"


@contextmanager
def temporary_folder(name: str) -> Iterator[Path]:
    """Yield a new folder that is removed afterwards, and remove those of this user whose processes were killed."""
    _sweep(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{name}-"))
    try:
        with FileLock(folder / LOCK, f"The folder {str(folder)!r}", REMEDY):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(base: Path) -> None:
    for lock in base.glob(f"{PREFIX}*-*/{LOCK}"):
        with suppress(OSError, InUseError):
            status = lock.parent.lstat()
            # Only who holds a lock writes to it: where something is written and nobody holds it, the holder is dead.
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and lock.stat().st_size:
                with FileLock(lock, f"The folder {str(lock.parent)!r}", REMEDY):
                    shutil.rmtree(lock.parent, ignore_errors=True)
