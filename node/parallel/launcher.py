"""``--gpus``: the command starts itself once for each GPU, through torch's elastic launcher, and again when a rank dies.

The launcher has no part in training and no network. It forwards Ctrl-C and SIGTERM to rank 0, which stops the others in good order
between two steps; the ranks are in sessions of their own, so a terminal's Ctrl-C reaches nobody twice. What the user can mend is
shown once and never tried again.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from shoal.node.exit_codes import ExitCode
from shoal.node.parallel import ends
from shoal.node.parallel.ends import End
from shoal.node.parallel.job import FOLDER, LAUNCHER, STARTS
from shoal.swarm.errors import ShoalError

STOP_S = 30  # seconds that the other ranks may take to end when one has died
FINAL = (
    ExitCode.BAD_INPUT,
    ExitCode.DEVICE_FAILED,
    ExitCode.INTERRUPTED,
)  # exit codes of a rank after which it is not started again


class RanksFailedError(ShoalError):
    """The ranks of this node ended, and are not started again."""

    def __init__(self, sentence: str, exit_code: int, trace: str = "") -> None:
        super().__init__(sentence)
        self.exit_code, self.trace = exit_code, trace


class Launcher:
    """The ranks of one node, until they have ended for good. ``forward`` is to handle this process's signals.

    Args:
        world: number of ranks.
        arguments: of ``shoal``, the same for each rank.
        restarts: how often all are started again after one died.
        program: what runs ``shoal``.
    """

    def __init__(self, world: int, arguments: Sequence[str], restarts: int, program: Sequence[str] = ("-m", "shoal")) -> None:
        self._world, self._arguments, self._restarts = world, [*program, *arguments], restarts
        self._signals = 0
        self._folder = Path()
        self._failures: dict[int, int] = {}

    def run(self) -> int:
        """Start the ranks and wait for them; return the exit code of rank 0. RanksFailedError if they failed."""
        with tempfile.TemporaryDirectory(prefix="shoal-ranks-") as folder:
            self._folder = Path(folder)
            starts = 0
            while True:
                self._start(starts)
                if not self._failures:
                    return ExitCode.OK
                left = ends.found(self._folder, self._world)
                if 0 in left and left[0].code == ExitCode.OK:  # it had finished; what ended after it is no matter
                    return ExitCode.OK
                if (code := self._final(left)) is not None:
                    return code
                if self._signals:
                    return ExitCode.INTERRUPTED
                why = self._why(left)
                if starts == self._restarts:
                    again = "" if not starts else f" again after {starts} restart{'s' * (starts > 1)}"
                    bug = ExitCode.INTERNAL in self._failures.values()
                    raise RanksFailedError(
                        f"This node ended{again}, because {why}: look at what it logged above, and start it again with --resume.",
                        ExitCode.INTERNAL if bug else ExitCode.SWARM_FAILED,
                    )
                starts += 1
                note = f"{why}: starting all {self._world} ranks again ({starts} of {self._restarts} times)"
                print(note, file=sys.stderr, flush=True)

    def _final(self, left: dict[int, End]) -> int | None:
        """Return the exit code if the ranks must not be started again; show why. RanksFailedError for what the user can mend."""
        for rank in sorted(left):
            end = left[rank]
            # Torch ends the others with SIGTERM when a rank has died; that asks nobody to stop for good.
            if end.lost or (end.code == ExitCode.INTERRUPTED and not self._signals and set(self._failures) != {rank}):
                continue
            if end.code in FINAL:
                if end.text:
                    trace, _, sentence = end.text.rpartition("Error: ")
                    raise RanksFailedError(sentence, end.code, trace)
                return end.code
        return None

    def _why(self, left: dict[int, End]) -> str:
        """Return the reason of a death that is worth another start."""
        for rank, code in sorted(self._failures.items()):
            if code < 0 and code != -signal.SIGTERM:  # with which torch ends the others
                return f"rank {rank} was ended by {signal.Signals(-code).name}"
        for rank, end in sorted(left.items()):
            if not end.lost:
                said = end.text.rpartition("Error: ")[2].rstrip(".")
                return f"rank {rank} ended with exit code {end.code}{': ' * bool(said)}{said}"
        rank, code = min(self._failures.items())
        return f"rank {rank} ended with exit code {code}"

    def _start(self, starts: int) -> None:
        """Run all ranks to their end in another thread: torch's launcher takes the signals for itself in the main one."""
        os.environ |= {FOLDER: str(self._folder), STARTS: str(starts), LAUNCHER: str(os.getpid())}
        os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(STOP_S)
        (self._folder / ends.PID).unlink(missing_ok=True)
        self._failures = {}
        thread = threading.Thread(target=self._elastic, name="shoal-ranks", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.2)  # signals are handled in between

    def _elastic(self) -> None:
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # it describes a rank's end in thirty lines
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=self._world,
            run_id=f"shoal-{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",  # a free port
            local_addr="127.0.0.1",
            max_restarts=0,  # restarts are counted here, because what the user can mend is not tried again
            monitor_interval=0.1,
        )
        try:
            elastic_launch(config, sys.executable)(*self._arguments)
        except ChildFailedError as error:
            self._failures = {rank: failure.exitcode for rank, failure in error.failures.items()}
        except Exception as error:  # the rendezvous: no port, no memory
            self._failures = {0: int(ExitCode.SWARM_FAILED)}
            print(f"The ranks could not be started ({type(error).__name__}: {error}).", file=sys.stderr)

    def forward(self, number: int, frame: object) -> None:
        """Hand a signal on to rank 0, as a signal handler; a rank that has not begun yet finds the note. A third one ends all."""
        self._signals += 1
        if self._signals > 2:
            os._exit(ExitCode.INTERRUPTED)  # the ranks end with this process
        (self._folder / ends.STOP).touch()
        try:
            os.kill(int((self._folder / ends.PID).read_text()), number)
        except (OSError, ValueError):
            return
