"""The disk budget of a run's folder. Only older checkpoints are removed to make room for the next one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from shoal.node.checkpoint.folder import CheckpointError, path_of, steps

GB = 10**9
SPARE = 1 << 20  # bytes beside the tensors of a checkpoint


def used(folder: Path) -> int:
    """Return the bytes of all files below ``folder``; links are not followed."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(where, name)).st_size
            except FileNotFoundError:  # it was replaced meanwhile
                continue
    return total


def room_maker(folder: Path, gigabytes: float) -> Callable[[int], None]:
    """Return the function that a `CheckpointWriter` calls with the bytes it is about to write. 0 gigabytes: no budget."""

    def make_room(nbytes: int) -> None:
        if gigabytes:
            _make_room(folder, int(gigabytes * GB), nbytes + SPARE)

    return make_room


def _make_room(folder: Path, budget: int, nbytes: int) -> None:
    """Remove checkpoints, oldest first but never the last, until ``nbytes`` more fit. Raises CheckpointError if they do not."""
    # By time: another run may have left higher steps.
    older = sorted((path for step in set(steps(folder)) if (path := path_of(folder, step)).is_dir()), key=_written)[:-1]
    while used(folder) + nbytes > budget:
        if not older:
            raise CheckpointError(
                f"The next checkpoint of {nbytes / GB:.3g} GB does not fit into the {budget / GB:.3g} GB that --disk allows for "
                f"{str(folder)!r}, besides the newest one: allow more."
            )
        shutil.rmtree(older.pop(0), ignore_errors=True)


def _written(path: Path) -> float:
    return path.stat().st_mtime
