"""``--gpus``: the command starts itself once for each GPU, through torch's elastic launcher, and
again when a rank dies.

The launcher has no part in training and no network. It forwards Ctrl-C and SIGTERM to rank 0, which
stops the others in good order between two steps; the ranks are in sessions of their own, so a
terminal's Ctrl-C reaches nobody twice. What the user can mend is shown once and never tried again.
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

from shoal.node.exit_code import ExitCode
from shoal.node.parallel.job import FOLDER, LAUNCHER, STARTS
from shoal.node.parallel.rank_process import PID, STOP, End, read_ends
from shoal.swarm.errors import ShoalError

MAX_RESTARTS = 3
STOP_S = 30
"""That the other ranks may take to end when one has died."""
LOOK_S = 0.2
"""Between two moments in which signals are handled."""
MAX_SIGNALS = 2
"""After more of them all ranks are ended at once."""
FINISHED = (ExitCode.OK, ExitCode.TRAINED_ALONE)
"""The run went to its end."""
FINAL = (ExitCode.BAD_INPUT, ExitCode.DEVICE_FAILED, ExitCode.INTERRUPTED)
"""After these a rank is not started again."""


class RanksFailedError(ShoalError):
    """The ranks of this node ended, and are not started again."""

    def __init__(self, sentence: str, exit_code: int, trace: str = "") -> None:
        super().__init__(sentence)
        self.exit_code = exit_code
        self.trace = trace


class Launcher:
    """The ``world`` ranks of one node, until they have ended for good.

    ``forward`` is to handle this process's signals.

    ``arguments``: of ``shoal``, which ``program`` runs; ``restarts``: how often all are started
    again after one died.
    """

    def __init__(
        self,
        world: int,
        arguments: Sequence[str],
        restarts: int,
        program: Sequence[str] = ("-m", "shoal"),
    ) -> None:
        self._world = world
        self._arguments = [*program, *arguments]
        self._restarts = restarts
        self._signals = 0
        self._folder = Path()
        self._failures: dict[int, int] = {}

    def run(self) -> int:
        """Start the ranks and wait for them; return the exit code of rank 0.

        Raises RanksFailedError if they failed.
        """
        with tempfile.TemporaryDirectory(prefix="shoal-ranks-") as folder:
            self._folder = Path(folder)
            starts = 0
            while True:
                self._start(starts)
                if not self._failures:
                    return ExitCode.OK
                left = read_ends(self._folder, self._world)
                # What ended after rank 0 is no matter.
                if 0 in left and left[0].code in FINISHED:
                    return left[0].code
                code = self._final(left)
                if code is not None:
                    return code
                if self._signals:
                    return ExitCode.INTERRUPTED
                why = self._why(left)
                if starts == self._restarts:
                    raise self._given_up(starts, why)
                starts += 1
                note = (
                    f"{why}: starting all {self._world} ranks again ({starts} of {self._restarts} "
                    "times)"
                )
                print(note, file=sys.stderr, flush=True)

    def _given_up(self, starts: int, why: str) -> RanksFailedError:
        again = ""
        if starts:
            again = f" again after {starts} restart{'s' * (starts > 1)}"
        code = ExitCode.SWARM_FAILED
        if ExitCode.INTERNAL in self._failures.values():
            code = ExitCode.INTERNAL
        return RanksFailedError(
            f"This node ended{again}, because {why}: look at what it logged above, and start it "
            "again with --resume.",
            code,
        )

    def _final(self, left: dict[int, End]) -> int | None:
        """Return the exit code if the ranks must not be started again; show why.

        Raises RanksFailedError for what the user can mend.
        """
        for rank in sorted(left):
            end = left[rank]
            # Torch ends the others with SIGTERM when a rank has died; that asks nobody to stop for
            # good.
            was_stopped = end.code == ExitCode.INTERRUPTED and not self._signals
            died_alone = set(self._failures) == {rank}
            if end.lost or (was_stopped and not died_alone):
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
            # With SIGTERM torch ends the others.
            if code < 0 and code != -signal.SIGTERM:
                return f"rank {rank} was ended by {signal.Signals(-code).name}"
        for rank, end in sorted(left.items()):
            if not end.lost:
                said = end.text.rpartition("Error: ")[2].rstrip(".")
                return f"rank {rank} ended with exit code {end.code}{': ' * bool(said)}{said}"
        rank, code = min(self._failures.items())
        return f"rank {rank} ended with exit code {code}"

    def _start(self, starts: int) -> None:
        """Run all ranks to their end in another thread: torch's launcher takes the signals for
        itself in the main one.
        """
        os.environ |= {FOLDER: str(self._folder), STARTS: str(starts), LAUNCHER: str(os.getpid())}
        os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(STOP_S)
        # Each rank's DDP would say on stderr that it looked for parameters without a part in the
        # loss, and found none.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        (self._folder / PID).unlink(missing_ok=True)
        self._failures = {}
        thread = threading.Thread(target=self._elastic, name="shoal-ranks", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(LOOK_S)

    def _elastic(self) -> None:
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        # It describes a rank's end in thirty lines.
        logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=self._world,
            run_id=f"shoal-{os.getpid()}",
            rdzv_backend="c10d",
            # A free port.
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            # Restarts are counted here, because what the user can mend is not tried again.
            max_restarts=0,
            monitor_interval=0.1,
        )
        try:
            elastic_launch(config, sys.executable)(*self._arguments)
        except ChildFailedError as error:
            self._failures = {rank: failure.exitcode for rank, failure in error.failures.items()}
        # The rendezvous: no port, no memory.
        except Exception as error:
            self._failures = {0: int(ExitCode.SWARM_FAILED)}
            print(
                f"The ranks could not be started ({type(error).__name__}: {error}).",
                file=sys.stderr,
            )

    def forward(self, number: int, frame: object) -> None:
        """Hand a signal on to rank 0, as a signal handler; a rank that has not begun yet finds the
        note. A third one ends all.
        """
        self._signals += 1
        if self._signals > MAX_SIGNALS:
            # The ranks end with this process.
            os._exit(ExitCode.INTERRUPTED)
        (self._folder / STOP).touch()
        try:
            os.kill(int((self._folder / PID).read_text()), number)
        except (OSError, ValueError):
            return
