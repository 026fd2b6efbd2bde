"""The folder of a node: its lock, and the checkpoints in it by name. Reads none of them."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from shoal.swarm.errors import ShoalError
from shoal.swarm.file_lock import FileLock

SAVING = ".saving-"
LOCK = ".lock"
# `.old-` marks a checkpoint that is being replaced by another of the same step, `.before-` one of
# an earlier run that went further.
_NAME = re.compile(r"(\.old-|\.before-)?step-([0-9]{8,15})")


class CheckpointError(ShoalError):
    """A checkpoint is missing, damaged, or cannot be written."""


def listed(folder: Path) -> list[tuple[int, Path]]:
    """Return all whole checkpoints as (step, path), newest first."""
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match is not None:
            mark, step = match.groups()
            found.append((mark != ".before-", int(step), mark is None, path))
    return [(step, path) for _, step, _, path in sorted(found, reverse=True)]


def steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in ``folder``, newest first."""
    return [step for step, _ in listed(folder)]


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def check_writable(folder: Path) -> None:
    """Create ``folder`` if it is missing, and check that files can be written there.

    Raises CheckpointError.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CheckpointError(
            f"Cannot write to the folder {str(folder)!r} ({error.strerror}): choose another one or "
            "change its permissions."
        ) from error


def lock(folder: Path) -> FileLock:
    """Make ``folder`` this node's alone until the lock is released, and remove what a node left
    there that was killed as it saved.

    Raises CheckpointError if it cannot be written, InUseError if another node uses it.
    """
    check_writable(folder)
    held = FileLock(
        folder / LOCK,
        f"The folder {str(folder)!r}",
        "stop that node, or choose another --name or --folder",
    )
    for left in folder.glob(SAVING + "*"):
        shutil.rmtree(left, ignore_errors=True)
    return held
