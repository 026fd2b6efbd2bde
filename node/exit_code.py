"""Exit codes of the commands."""

from __future__ import annotations

from enum import IntEnum


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
