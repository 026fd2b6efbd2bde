"""Nonces, which make equal messages differ: the only random numbers in the protocols of an exchange."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextvars import ContextVar

SIZE = 16

_source: ContextVar[Callable[[int], bytes]] = ContextVar("nonces", default=secrets.token_bytes)


def fresh_nonce() -> bytes:
    """Return sixteen random bytes that nobody can predict."""
    return _source.get()(SIZE)


def nonces_from(source: Callable[[int], bytes]) -> None:
    """Take nonces from ``source(bytes)`` in this context and its tasks, for a simulation that can be repeated."""
    _source.set(source)
