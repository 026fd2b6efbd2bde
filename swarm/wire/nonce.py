"""Nonces: what makes two messages that say the same differ. The one source of chance in the protocols of an exchange."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextvars import ContextVar

SIZE = 16

_source: ContextVar[Callable[[int], bytes]] = ContextVar("nonces", default=secrets.token_bytes)


def fresh_nonce() -> bytes:
    """Sixteen bytes that nobody can foresee."""
    return _source.get()(SIZE)


def nonces_from(source: Callable[[int], bytes]) -> None:
    """In this context, and in tasks begun in it, take them from ``source(bytes)``: for a simulation, which repeats itself."""
    _source.set(source)
