"""Errors of data."""

from __future__ import annotations

from shoal.swarm.errors import ShoalError


class DataError(ShoalError):
    """Unreadable or insufficient text, a missing tokenizer, or an option of the text task out of range."""


def reason(error: BaseException) -> str:
    """Return the first line of ``error``, short, for use inside a sentence."""
    said = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), "")
    return str(said)[:200].rstrip(" .:") or type(error).__name__
