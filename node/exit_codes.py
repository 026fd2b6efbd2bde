"""The exit codes of ``shoal``: what each says to a script."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """How a command ended."""

    OK = 0
    """The command did all that it was asked for."""

    INTERNAL = 1
    """A bug in shoal: a traceback is on stderr; please report it."""

    BAD_INPUT = 2
    """A flag, file, key, link or setting cannot be used; nothing was changed, and one sentence says what to mend."""

    SWARM_FAILED = 3
    """The run or demo ended early because the swarm or one of its nodes failed."""

    REFUSED = 4
    """`shoal verify` checked a claim and refuses it."""

    INTERRUPTED = 130
    """Stopped by Ctrl-C or a termination signal, after the step was finished and the state saved."""


MEANING: dict[ExitCode, str] = {
    ExitCode.OK: "all went well",
    ExitCode.INTERNAL: "a bug in shoal, with a traceback on stderr",
    ExitCode.BAD_INPUT: "bad input: one sentence on stderr says what to mend",
    ExitCode.SWARM_FAILED: "the swarm or one of its nodes failed",
    ExitCode.REFUSED: "a claim was checked and refused (`shoal verify`)",
    ExitCode.INTERRUPTED: "stopped by Ctrl-C or a termination signal",
}


def epilogue() -> str:
    """The exit codes on one line each, for ``shoal --help``."""
    return "Exit codes:\n" + "\n".join(f"  {int(code):>3}  {meaning}" for code, meaning in MEANING.items())
