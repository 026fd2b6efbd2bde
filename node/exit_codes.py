"""The exit codes of ``shoal``, for scripts."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """The exit status of a command."""

    OK = 0
    """The command did all that it was asked for."""

    INTERNAL = 1
    """A bug in shoal: a traceback is on stderr; please report it."""

    BAD_INPUT = 2
    """A flag, file, key, link or setting cannot be used, or the user's own code (a task, an environment) failed.

    One sentence on stderr says what to mend; above it is the traceback of that code.
    """

    SWARM_FAILED = 3
    """The run or demo ended early because the swarm or one of its nodes failed."""

    REFUSED = 4
    """`shoal verify` checked a claim and refuses it."""

    DEVICE_FAILED = 5
    """The device reported that an operation on it failed; the last checkpoint remains."""

    UNFIT_MACHINE = 10
    """`shoal doctor`: Python, PyTorch, device, memory, disk or clock are in the way."""

    NO_DAEMON = 11
    """`shoal doctor`: the network daemon does not start, or its port is taken."""

    UNREACHED = 12
    """`shoal doctor`: nobody behind the link can be reached."""

    DIFFERS = 13
    """`shoal doctor`: swarm id, version, task or model differ from the swarm's."""

    INTERRUPTED = 130
    """Stopped by Ctrl-C or a termination signal, after the step was finished and the state saved."""


MEANING: dict[ExitCode, str] = {
    ExitCode.OK: "all went well",
    ExitCode.INTERNAL: "a bug in shoal, with a traceback on stderr",
    ExitCode.BAD_INPUT: "bad input, or your own task failed: a sentence on stderr says what to mend",
    ExitCode.SWARM_FAILED: "the swarm or one of its nodes failed",
    ExitCode.REFUSED: "a claim was checked and refused (`shoal verify`)",
    ExitCode.DEVICE_FAILED: "the device (a GPU) failed; the last checkpoint remains",
    ExitCode.UNFIT_MACHINE: "`shoal doctor`: Python, PyTorch, device, memory, disk or clock are in the way",
    ExitCode.NO_DAEMON: "`shoal doctor`: the network daemon does not start, or the port is taken",
    ExitCode.UNREACHED: "`shoal doctor`: nobody behind the link can be reached",
    ExitCode.DIFFERS: "`shoal doctor`: swarm id, version, task or model differ from the swarm's",
    ExitCode.INTERRUPTED: "stopped by Ctrl-C or a termination signal",
}


def epilogue() -> str:
    """Return the exit codes, one a line, for ``shoal --help``."""
    return "Exit codes:\n" + "\n".join(f"  {int(code):>3}  {meaning}" for code, meaning in MEANING.items())
