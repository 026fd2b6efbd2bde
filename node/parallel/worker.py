"""The start of one rank as a process: who ends it, what it may print, and how its end is reported."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from shoal.node.exit_codes import ExitCode
from shoal.node.parallel import ends
from shoal.node.parallel.ends import End, RankLostError, RankMissingError
from shoal.node.parallel.job import LAUNCHER, Job
from shoal.node.user_code import explained
from shoal.swarm.errors import ShoalError


def launcher() -> int | None:
    """Return the process id of the launcher; None under torchrun."""
    found = os.environ.get(LAUNCHER, "")
    return int(found) if found.isdigit() else None


def begin_leading(job: Job) -> None:
    """Let the launcher know where its signals go. KeyboardInterrupt if one came before."""
    if job.folder is None:
        return
    new = job.folder / f"{ends.PID}.new"
    new.write_text(str(os.getpid()))
    os.replace(new, job.folder / ends.PID)
    if (job.folder / ends.STOP).exists():
        raise KeyboardInterrupt


def begin_following() -> None:
    """Print nothing from now on, and leave Ctrl-C and SIGTERM to rank 0, which ends this rank once they have met.

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
    """Return whether the ranks have met. Without importing torch: a rank that has not is often one that ends before it does."""
    found = sys.modules.get("torch.distributed")
    return found is not None and bool(found.is_initialized())


def run_rank(job: Job, work: Callable[[], int]) -> NoReturn:
    """Do ``work`` as rank ``job.rank`` and end this process with its exit code, or with that of the error that it raised.

    The launcher gets what the user should read; under torchrun it goes to stderr, from each rank that has an error of its own.
    The process ends at once then: threads of torch would wait for ranks that are gone.
    """
    error: Exception | None = None
    try:
        code = work()
    except KeyboardInterrupt:
        code = int(ExitCode.INTERRUPTED)
    except Exception as raised:
        error = ends.as_lost(raised, job) or (raised if isinstance(raised, ShoalError) else explained(raised))
        if error is None:
            traceback.print_exc()
            print("Error: this is a bug in shoal: please report it with the lines above.", file=sys.stderr)
        code = int(ExitCode.INTERNAL if error is None else getattr(error, "exit_code", ExitCode.BAD_INPUT))
    lost, text = isinstance(error, RankLostError), "" if error is None else f"{getattr(error, 'trace', '')}Error: {error}"
    heard = job.leads or not lost or isinstance(error, RankMissingError)  # torchrun ends the others when the first has ended
    if not ends.leave(job, End(code, text, lost)) and text and heard:
        print(text, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)
