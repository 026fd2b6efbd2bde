"""``--gpus``: the command starts itself once for each GPU, through torch's elastic launcher, and
again when a rank dies.

The launcher has no part in training and no network. It forwards Ctrl-C and SIGTERM to rank 0, which
stops the others in good order between two steps; the ranks are in sessions of their own, so a
terminal's Ctrl-C reaches nobody twice. What the user can mend is shown once and never tried again.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from shoal.node.config.settings import MAX_RANKS, ConfigError, Settings
from shoal.node.console import ExitCode
from shoal.node.user_code import explained
from shoal.swarm.errors import ShoalError
from shoal.swarm.file_lock import replace_file

if TYPE_CHECKING:
    import torch


# The place of this process in a torch.distributed job, as torch's launchers set it in the
# environment.

NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
FOLDER = "SHOAL_RANKS_FOLDER"  # of the launcher: what the ranks leave for it
LAUNCHER = "SHOAL_RANKS_LAUNCHER"  # its process id
# of the swarm to join: the ranks ask nobody again where the argument is a name
LINK = "SHOAL_RANKS_LINK"
STARTS = "SHOAL_RANKS_STARTS"  # how often the launcher has started the ranks again


@dataclass(frozen=True)
class Job:
    """A process of a peer of several ranks."""

    rank: int
    world: int
    """Number of ranks."""
    restarts: int = 0
    """How often the ranks were started again after one of them had died."""
    folder: Path | None = None
    """Folder of our own launcher; None under torchrun."""

    @property
    def leads(self) -> bool:
        """True for the rank that speaks to the swarm and to the user."""
        return self.rank == 0


def job_of(environment: Mapping[str, str] | None = None) -> Job | None:
    """Return this process's place in a job of several ranks, or None.

    ConfigError if its ranks are on several machines.
    """
    found = os.environ if environment is None else environment
    if any(name not in found for name in NEEDED):
        return None
    try:
        rank, world, local = (int(found[name]) for name in NEEDED[:3])
        here = int(found.get("LOCAL_WORLD_SIZE", world))
        restarts = int(found.get(STARTS, found.get("TORCHELASTIC_RESTART_COUNT", "0")))
    except ValueError as error:
        raise ConfigError(
            f"The environment's RANK, WORLD_SIZE and LOCAL_RANK must be numbers ({error}): start "
            "with torchrun, or without them."
        ) from None
    if world <= 1:
        return None
    if here != world or local != rank or world > MAX_RANKS:
        raise ConfigError(
            f"The ranks of one peer must be on one machine, at most {MAX_RANKS} of them: start "
            "torchrun with --nnodes 1, and a peer on each machine."
        )
    if not 0 <= rank < world:
        raise ConfigError(
            f"The environment has RANK={rank} of WORLD_SIZE={world}: start with torchrun, or "
            "without them."
        )
    folder = found.get(FOLDER)
    return Job(rank, world, restarts, None if folder is None else Path(folder))


def rank_device(settings: Settings, job: Job) -> torch.device:
    """Return the device of this rank.

    ConfigError if torchrun started other ranks than the settings ask for, or too many.
    """
    import torch

    from shoal.node.config.device import accelerator, resolve_device

    node = settings.node
    if node.gpus not in (None, "all", str(job.world)):
        raise ConfigError(
            f"--gpus {node.gpus} does not go with the {job.world} ranks that torchrun has started: "
            "leave it out."
        )
    if node.device.partition(":")[0] == "mps" or ":" in node.device:
        raise ConfigError(
            f"Each rank has a device of its own, so {node.device!r} cannot be used: use cuda or "
            "cpu, or neither."
        )
    kind, devices = accelerator()
    if node.device == "cpu" or (node.device == "auto" and not devices):
        return torch.device("cpu")
    if node.device not in ("auto", kind):
        resolve_device(node.device)  # says what is here
    if job.world > devices:
        raise ConfigError(
            f"{job.world} ranks need as many GPUs, and this machine has {devices}: start fewer, or "
            "pass --device cpu."
        )
    return torch.device(kind, job.rank)


def ranks_wanted(settings: Settings, devices: int | None = None) -> int:
    """Return the number of ranks that the settings ask for.

    ``devices``: GPUs here; None asks torch.

    Raises ConfigError: there are fewer GPUs, or the device goes with one process only.
    """
    node = settings.node
    device = node.device.partition(":")[0]
    if node.gpus is None:
        if node.parallel is not None:
            raise ConfigError(
                "--parallel says how several GPUs share the model: pass --gpus all or --gpus N too."
            )
        return 1
    if device == "mps" or (node.gpus != "1" and ":" in node.device):
        raise ConfigError(
            f"--gpus takes the first GPUs, and {node.device!r} does not go with it: leave --device "
            "out, or use cpu."
        )
    if device == "cpu":
        if node.gpus == "all":
            raise ConfigError(
                "--gpus all counts GPUs, which --device cpu does not use: pass a number, such as "
                "--gpus 2."
            )
        return int(node.gpus)
    if devices is None:
        from shoal.node.config.device import (
            accelerator,
        )  # here, because torch takes a second, and most nodes need no count

        devices = accelerator()[1]
    wanted = devices if node.gpus == "all" else int(node.gpus)
    if wanted > devices or not devices:
        seen = (
            "no GPU that PyTorch can use"
            if not devices
            else "1 GPU"
            if devices == 1
            else f"{devices} GPUs"
        )
        todo = "--device cpu, to try it on the processor" if not devices else f"--gpus {devices}"
        raise ConfigError(
            f"--gpus {node.gpus} asks for more than this machine has ({seen}): use {todo}."
        )
    if wanted > MAX_RANKS:
        raise ConfigError(f"A peer has at most {MAX_RANKS} ranks: pass --gpus {MAX_RANKS}.")
    return wanted


# The ends of ranks: each that fails leaves a file for the launcher, which shows one sentence for
# all of them.

PID = "pid"
STOP = "stop"


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
    if (
        "torch" not in sys.modules
    ):  # it takes a second to import, and none of its collectives has been called
        return None
    from shoal.optim.ranks.lost_rank import lost

    if (first := lost(error)) is None:
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


# The start of one rank as a process: who ends it, what it may print, and how its end is reported.


def launcher() -> int | None:
    """Return the process id of the launcher; None under torchrun."""
    found = os.environ.get(LAUNCHER, "")
    return int(found) if found.isdigit() else None


def begin_leading(job: Job) -> None:
    """Let the launcher know where its signals go. KeyboardInterrupt if one came before."""
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
        error = as_lost(raised, job) or (
            raised if isinstance(raised, ShoalError) else explained(raised)
        )
        if error is None:
            traceback.print_exc()
            print(
                "Error: this is a bug in shoal: please report it with the lines above.",
                file=sys.stderr,
            )
        code = int(
            ExitCode.INTERNAL if error is None else getattr(error, "exit_code", ExitCode.BAD_INPUT)
        )
    lost = isinstance(error, RankLostError)
    text = "" if error is None else f"{getattr(error, 'trace', '')}Error: {error}"
    heard = (
        job.leads or not lost or isinstance(error, RankMissingError)
    )  # torchrun ends the others when the first has ended
    if not leave_end(job, End(code, text, lost)) and text and heard:
        print(text, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


MAX_RESTARTS = 3
STOP_S = 30  # seconds that the other ranks may take to end when one has died
FINISHED = (ExitCode.OK, ExitCode.TRAINED_ALONE)  # the run went to its end
FINAL = (
    ExitCode.BAD_INPUT,
    ExitCode.DEVICE_FAILED,
    ExitCode.INTERRUPTED,
)  # after these a rank is not started again


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
        self._world, self._arguments, self._restarts = world, [*program, *arguments], restarts
        self._signals = 0
        self._folder = Path()
        self._failures: dict[int, int] = {}

    def run(self) -> int:
        """Start the ranks and wait for them; return the exit code of rank 0.

        RanksFailedError if they failed.
        """
        with tempfile.TemporaryDirectory(prefix="shoal-ranks-") as folder:
            self._folder = Path(folder)
            starts = 0
            while True:
                self._start(starts)
                if not self._failures:
                    return ExitCode.OK
                left = read_ends(self._folder, self._world)
                if 0 in left and left[0].code in FINISHED:  # what ended after it is no matter
                    return left[0].code
                if (code := self._final(left)) is not None:
                    return code
                if self._signals:
                    return ExitCode.INTERRUPTED
                why = self._why(left)
                if starts == self._restarts:
                    again = (
                        "" if not starts else f" again after {starts} restart{'s' * (starts > 1)}"
                    )
                    bug = ExitCode.INTERNAL in self._failures.values()
                    raise RanksFailedError(
                        f"This node ended{again}, because {why}: look at what it logged above, and "
                        "start it again with --resume.",
                        ExitCode.INTERNAL if bug else ExitCode.SWARM_FAILED,
                    )
                starts += 1
                note = (
                    f"{why}: starting all {self._world} ranks again ({starts} of {self._restarts} "
                    "times)"
                )
                print(note, file=sys.stderr, flush=True)

    def _final(self, left: dict[int, End]) -> int | None:
        """Return the exit code if the ranks must not be started again; show why.

        RanksFailedError for what the user can mend.
        """
        for rank in sorted(left):
            end = left[rank]
            # Torch ends the others with SIGTERM when a rank has died; that asks nobody to stop for
            # good.
            if end.lost or (
                end.code == ExitCode.INTERRUPTED
                and not self._signals
                and set(self._failures) != {rank}
            ):
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
            thread.join(0.2)  # signals are handled in between

    def _elastic(self) -> None:
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        logging.getLogger("torch.distributed").setLevel(
            logging.CRITICAL
        )  # it describes a rank's end in thirty lines
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=self._world,
            run_id=f"shoal-{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",  # a free port
            local_addr="127.0.0.1",
            # restarts are counted here, because what the user can mend is not tried again
            max_restarts=0,
            monitor_interval=0.1,
        )
        try:
            elastic_launch(config, sys.executable)(*self._arguments)
        except ChildFailedError as error:
            self._failures = {rank: failure.exitcode for rank, failure in error.failures.items()}
        except Exception as error:  # the rendezvous: no port, no memory
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
        if self._signals > 2:
            os._exit(ExitCode.INTERRUPTED)  # the ranks end with this process
        (self._folder / STOP).touch()
        try:
            os.kill(int((self._folder / PID).read_text()), number)
        except (OSError, ValueError):
            return
