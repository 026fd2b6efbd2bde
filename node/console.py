"""What all commands share: exit codes, JSON, tables and numbers for people, logging, free memory,
optional packages, addresses.

What reads a node's output is not the node's: ``| head`` ends, ``| tee`` dies, an ssh session is
gone. From then on every write fails, and training goes on without.
"""

from __future__ import annotations

import errno
import gc
import importlib.util
import io
import json
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, NamedTuple

from shoal.swarm.errors import ShoalError


class ExitCode(IntEnum):
    """The exit status of a command; ``meaning`` is for people."""

    def __new__(cls, value: int, meaning: str) -> ExitCode:
        code = int.__new__(cls, value)
        code._value_ = value
        code.meaning = meaning
        return code

    meaning: str
    OK = 0, "all went well"
    INTERNAL = 1, "a bug in shoal, with a traceback on stderr"
    BAD_INPUT = 2, "bad input, or your own task failed: a sentence on stderr says what to mend"
    SWARM_FAILED = 3, "the swarm or one of its nodes failed"
    REFUSED = 4, "a claim was checked and refused (`shoal verify`)"
    DEVICE_FAILED = 5, "the device (a GPU) failed; the last checkpoint remains"
    TRAINED_ALONE = (
        6,
        "the run went to its end, but exchanged nothing though others were there",
    )
    UNFIT_MACHINE = (
        10,
        "`shoal doctor`: Python, PyTorch, device, memory, disk or clock are in the way",
    )
    NO_DAEMON = 11, "`shoal doctor`: the network daemon does not start, or the port is taken"
    UNREACHED = 12, "`shoal doctor`: nobody behind the link can be reached"
    DIFFERS = 13, "`shoal doctor`: swarm id, version, task or model differ from the swarm's"
    INTERRUPTED = 130, "stopped by Ctrl-C or a termination signal"


BUG = "Error: this is a bug in shoal: please report it with the lines above."
"""Below the traceback of what nobody foresaw."""


def epilogue() -> str:
    """Return the exit codes, one a line, for ``shoal --help``."""
    return "Exit codes:\n" + "\n".join(f"  {int(code):>3}  {code.meaning}" for code in ExitCode)


def finite(value: Any) -> Any:
    """Return ``value``, of mappings, sequences and plain values, with None for each float that is
    not finite: JSON has none.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite(inner) for inner in value]
    return value


def dumps(value: Any) -> str:
    return json.dumps(finite(value), allow_nan=False)


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    words: Collection[str],
    width: int,
    title: str = "",
) -> str:
    """Return a table for people, ``width`` characters wide at most: ``words`` are the columns that
    stand to the left.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(title=Text(title) if title else None)
    for column in columns:
        grid.add_column(column, justify="left" if column in words else "right")
    for cells in rows:
        grid.add_row(*map(Text, cells))  # Text: a stranger's name must not be markup
    console = Console(width=width)
    with console.capture() as capture:
        console.print(grid)
    return capture.get().rstrip()


def figure(value: float | None, form: str = ".3f") -> str:
    """Return a number for people; a dash where it is not known or not finite."""
    return format(value, form) if value is not None and math.isfinite(value) else "-"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


_GONE = {errno.EPIPE, errno.EIO, errno.ENXIO}  # of a pipe, and of a terminal
FULL = {errno.ENOSPC, errno.EDQUOT}  # a disk


class _Lasting(io.FileIO):
    """Descriptor of which nothing is written any more once its reader is gone, by this process or
    one that it starts.
    """

    lost = False

    def write(self, data: Any, /) -> int:
        """Write, or drop what nobody can read; results in a file on a full disk are missed,
        messages are not.
        """
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in _GONE:
                self.lost = True
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, self.fileno())
                os.close(null)
            elif error.errno not in {*FULL, errno.EFBIG} or self.fileno() != 2:
                raise
        return memoryview(data).nbytes


def drop_lost_output() -> None:
    """Let this process go on when the reader of its stdout or stderr is gone."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, name)
        if isinstance(old, io.TextIOWrapper) and old is getattr(
            sys, f"__{name}__"
        ):  # else someone reads it in this process
            raw = _Lasting(number, "wb", closefd=False)
            buffer: Any = (
                raw if isinstance(old.buffer, io.RawIOBase) else io.BufferedWriter(raw)
            )  # raw: PYTHONUNBUFFERED
            new = io.TextIOWrapper(
                buffer,
                old.encoding,
                old.errors,
                line_buffering=old.line_buffering,
                write_through=old.write_through,
            )
            setattr(sys, name, new)


def is_lost(stream: Any) -> bool:
    """Return whether the reader of ``stream`` is gone, as far as a write has shown."""
    buffer = getattr(stream, "buffer", None)
    return getattr(getattr(buffer, "raw", buffer), "lost", False) is True


def log_to_stderr(verbose: bool) -> None:
    """Log to stderr, for as long as the process lives."""
    # Warnings of shoal are for the user; the rest, and what libraries log, come only with
    # --verbose.
    level = logging.WARNING if verbose else logging.ERROR
    logging.basicConfig(
        stream=sys.stderr, level=level, format="%(levelname)s %(name)s: %(message)s", force=True
    )
    (handler,) = logging.getLogger().handlers
    handler.setLevel(logging.DEBUG if verbose else logging.WARNING)  # a log file gets more
    handler.addFilter(lambda record: record.name != DISPLAYED)
    logging.getLogger("shoal").setLevel(logging.DEBUG if verbose else logging.WARNING)
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "WARNING" if verbose else "ERROR")


DISPLAYED = "shoal.node.runtime.display"  # the logger of what the display has shown already
LOG_BYTES, LOGS = 2 << 20, 3  # bytes of a node's log file, and how many older ones are kept


@contextmanager
def log_to_file(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Log to ``path`` too while the block runs, with `LOGS` older files of `LOG_BYTES` each; a
    sentence to ``say`` if it cannot.
    """
    logger = logging.getLogger("shoal")
    try:
        handler = RotatingFileHandler(
            path, maxBytes=LOG_BYTES, backupCount=LOGS, encoding="utf-8", errors="backslashreplace"
        )
    except OSError as error:
        say(
            f"Cannot write the log {str(path)!r} ({error.strerror}): free some space or choose "
            "another folder."
        )
        yield
        return
    handler.handleError = lambda record: None  # type: ignore[method-assign]  # a full disk ends no training
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(before or logging.INFO, logging.INFO))
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
        handler.close()


def free_memory(
    proc: Path = Path("/proc"), group: Path = Path("/sys/fs/cgroup")
) -> tuple[float, float]:
    """Return the bytes of main memory available now, and in all: the machine's, or its container's
    where that is less.
    """
    try:
        values = _numbers(proc / "meminfo", 1024)
        free = values["MemAvailable:"]
        total = values["MemTotal:"]
    except (OSError, ValueError, KeyError):
        free = total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    try:  # of a container, as it sees it; a word in place of a number: no limit
        limit = float((group / "memory.max").read_text(encoding="ascii"))
        used = (
            float((group / "memory.current").read_text(encoding="ascii"))
            - _numbers(group / "memory.stat", 1)["inactive_file"]
        )
    except (OSError, ValueError, KeyError):
        return free, total
    return max(min(free, limit - used), 0.0), min(total, limit)


def _numbers(path: Path, unit: int) -> dict[str, float]:
    """Return the first number of each line by the line's first word, times ``unit``."""
    words = (line.split() for line in path.read_text(encoding="ascii").splitlines())
    return {found[0]: unit * float(found[1]) for found in words if len(found) > 1}


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause garbage collection while modules are imported, and never look at what they hold again:
    it is no garbage.

    Collecting takes a sixth of the time that importing torch takes, because much is made then and
    all of it stays.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.freeze()
            gc.enable()


def require(
    error: type[ShoalError], what: str, *packages: str, extra: str, otherwise: str = ""
) -> None:
    """Raise ``error`` unless all ``packages``, which ``what`` needs and shoal's ``extra`` installs,
    can be found; none is imported.

    ``otherwise``: what can be done without them, such as "name files".
    """
    missing = [package for package in packages if not _is_there(package)]
    if missing:
        lacking = (
            f"the package {missing[0]}, which is"
            if len(missing) == 1
            else f"the packages {', '.join(missing)}, which are"
        )
        instead = f", or {otherwise}" if otherwise else ""
        raise error(
            f"{what} needs {lacking} not installed: run pip install 'shoal[{extra}]'{instead}."
        )


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # a package above it is missing, or was put in place by hand
        return False


# Addresses that commands listen on.

HERE = "127.0.0.1"
MAX_PORT = 65_535


class Address(NamedTuple):
    """A host to listen on, and a port; 0 is any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def next(self, number: int) -> Address:
        """Return the address ``number`` ports further; any free port stays any free port."""
        return self._replace(port=self.port + number if self.port else 0)


def parse_address(text: str) -> Address:
    """Return ``text`` as an address; without a host it is loopback, which other machines cannot
    reach. Raises ValueError.
    """
    found = re.fullmatch(r"(?:(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9.-]{1,253}):)?([0-9]{1,5})", text)
    if found is None or int(found[2]) > MAX_PORT:
        raise ValueError(
            "it should be a port or HOST:PORT, such as 9464 or 0.0.0.0:9464, with a port of at "
            "most 65535"
        )
    return Address((found[1] or HERE).strip("[]"), int(found[2]))
