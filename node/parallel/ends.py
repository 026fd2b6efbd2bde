"""The ends of ranks: each that fails leaves a file for the launcher, which shows one sentence for all of them."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal.node.exit_codes import ExitCode
from shoal.node.parallel.job import Job
from shoal.swarm.errors import ShoalError

PID, STOP = "pid", "stop"


class RankLostError(ShoalError):
    """Another rank of this peer ended, so this one cannot go on."""

    exit_code = ExitCode.SWARM_FAILED


class RankMissingError(RankLostError):
    """A rank did not start, which the others do not know."""


@dataclass(frozen=True)
class End:
    """The end of a rank that failed."""

    code: int
    text: str
    """What the user should read; empty if it is on stderr already."""
    lost: bool = False
    """True if it ended only because another rank had."""


def as_lost(error: BaseException, job: Job) -> RankLostError | None:
    """Return the error that stands for a collective that failed because another rank is gone; None for another error."""
    if isinstance(error, RankLostError):
        return error
    if "torch" not in sys.modules:  # it takes a second to import, and none of its collectives has been called
        return None
    from shoal.optim.ranks.group import lost

    if (first := lost(error)) is None:
        return None
    return RankLostError(f"Rank {job.rank} of this node lost another rank ({first}): see what that one logged.")


def leave(job: Job, end: End) -> bool:
    """Leave ``end`` for the launcher. False if there is none to read it."""
    if job.folder is None:
        return False
    try:
        path = job.folder / f"rank-{job.rank}.json"
        new = path.with_suffix(".new")
        new.write_text(json.dumps(asdict(end)))
        os.replace(new, path)
    except OSError:
        return False
    return True


def found(folder: Path, world: int) -> dict[int, End]:
    """Return what the ranks have left, and remove it."""
    ends = {}
    for rank in range(world):
        path = folder / f"rank-{rank}.json"
        try:
            ends[rank] = End(**json.loads(path.read_text()))
            path.unlink()
        except (OSError, ValueError, TypeError):
            continue
    return ends
