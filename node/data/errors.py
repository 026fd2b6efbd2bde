"""What can be wrong with data."""

from __future__ import annotations

from shoal.swarm.errors import ShoalError


class DataError(ShoalError):
    """The text or its tokenizer cannot be read or does not suffice, or an option of the text task is out of range."""


def reason(error: BaseException) -> str:
    """The first line of what ``error`` says, short, for use inside a sentence."""
    said = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), "")
    return str(said)[:200].rstrip(" .:") or type(error).__name__
