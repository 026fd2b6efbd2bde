"""Errors of a rank whose peer cannot go on, and how to know that a collective raised one."""

from __future__ import annotations

_LOST = ("third_party/gloo", "[gloo", "nccl error", "ncclremoteerror")
"""In what a collective raises, in lower case, where another rank is gone."""


class RankLost(RuntimeError):
    """Error of a rank whose peer cannot go on: another rank died, failed or did not answer in time.

    The launcher restarts all.
    """


class RankFailed(RuntimeError):
    """Error of a rank whose peer cannot go on, because of what ``rank`` raised: ``said``."""

    def __init__(self, rank: int, said: str) -> None:
        super().__init__(f"rank {rank} of this peer failed: {said}")
        self.rank = rank
        self.said = said


def lost(error: BaseException) -> str | None:
    """Return the first line of what a collective raised because another rank is gone; None for
    another error.

    The error's causes count: what a collective raised in the user's loss() is not the user's error.
    """
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        kinds = {kind.__name__ for kind in type(cause).__mro__}
        text = str(cause)
        known = bool(kinds & {"DistError", "RankLost", "RankFailed"})
        if known or any(word in text.lower() for word in _LOST):
            return next(iter(text.strip().splitlines()), type(cause).__name__)[:200]
        cause = cause.__cause__
    return None
