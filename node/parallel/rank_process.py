"""One rank as a process: who ends it, what it may print, and how its end is reported.

Each rank that fails leaves a file for the launcher, which shows one sentence for all of them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from shoal.node.exit_code import BUG, ExitCode
from shoal.node.parallel.job import LAUNCHER, Job
from shoal.node.user_code import explained
from shoal.swarm.errors import ShoalError
from shoal.swarm.file_lock import replace_file

PID = "pid"
"""File with the process id of rank 0."""
STOP = "stop"
"""File that says that a signal came before rank 0 had begun."""


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
    """Return the error that stands for a collective that failed because another rank is gone; None
    for another error.
    """
    if isinstance(error, RankLostError):
        return error
    # It takes a second to import, and none of its collectives has been called.
    if "torch" not in sys.modules:
        return None
    from shoal.optim.ranks.lost_rank import lost

    first = lost(error)
    if first is None:
        return None
    return RankLostError(
        f"Rank {job.rank} of this node lost another rank ({first}): see what that one logged."
    )


def leave_end(job: Job, end: End) -> bool:
    """Leave ``end`` for the launcher. False if there is none to read it."""
    if job.folder is None:
        return False
    try:
        replace_file(job.folder / f"rank-{job.rank}.json", json.dumps(asdict(end)))
    except OSError:
        return False
    return True


def read_ends(folder: Path, world: int) -> dict[int, End]:
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


def launcher_pid() -> int | None:
    """Return the process id of the launcher; None under torchrun."""
    found = os.environ.get(LAUNCHER, "")
    return int(found) if found.isdigit() else None


def begin_leading(job: Job) -> None:
    """Let the launcher know where its signals go. Raises KeyboardInterrupt if one came before."""
    if job.folder is None:
        return
    replace_file(job.folder / PID, str(os.getpid()))
    if (job.folder / STOP).exists():
        raise KeyboardInterrupt


def begin_following() -> None:
    """Print nothing from now on, and leave Ctrl-C and SIGTERM to rank 0, which ends this rank once
    they have met.

    A second one ends it at once.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
    asked = False

    def handle(number: int, frame: object) -> None:
        nonlocal asked
        if (asked or not _met()) and number != signal.SIGHUP:
            os._exit(ExitCode.INTERRUPTED)
        asked = True

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handle)


def _met() -> bool:
    """Return whether the ranks have met.

    Without importing torch: a rank that has not is often one that ends before it does.
    """
    found = sys.modules.get("torch.distributed")
    return found is not None and bool(found.is_initialized())


def run_rank(job: Job, work: Callable[[], int]) -> NoReturn:
    """Do ``work`` as rank ``job.rank`` and end this process with its exit code, or with that of the
    error that it raised.

    The launcher gets what the user should read; under torchrun it goes to stderr, from each rank
    that has an error of its own. The process ends at once then: threads of torch would wait for
    ranks that are gone.
    """
    error: Exception | None = None
    try:
        code = work()
    except KeyboardInterrupt:
        code = int(ExitCode.INTERRUPTED)
    except Exception as raised:
        error = _for_user(raised, job)
        code = int(ExitCode.INTERNAL)
        if error is None:
            traceback.print_exc()
            print(BUG, file=sys.stderr)
        else:
            code = int(getattr(error, "exit_code", ExitCode.BAD_INPUT))
    is_lost = isinstance(error, RankLostError)
    text = ""
    if error is not None:
        trace = getattr(error, "trace", "")
        text = f"{trace}Error: {error}"
    # Under torchrun those that only lost another rank say nothing, and it ends the others when the
    # first has ended.
    has_own_error = job.leads or not is_lost or isinstance(error, RankMissingError)
    if not leave_end(job, End(code, text, is_lost)) and text and has_own_error:
        print(text, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def _for_user(raised: Exception, job: Job) -> Exception | None:
    """Return what ``raised`` means to the user; None for a bug of Shoal's."""
    lost = as_lost(raised, job)
    if lost is not None:
        return lost
    if isinstance(raised, ShoalError):
        return raised
    return explained(raised)
