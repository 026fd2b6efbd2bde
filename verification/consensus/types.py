"""What the protocol and those who call it exchange: refusals, limits and duties."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from shoal.verification.consensus.records import (
    Claim,
    Mark,
)


class Refused(ValueError):
    """A record was not taken; ``reason`` is one of `REASONS`."""

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True)
class Limits:
    """How much a peer keeps."""

    claims: int = 256
    """Of one author in one round."""
    waiting: int = 16_384
    """Claims and appeals whose verifiers are not drawn yet."""
    strangers: int = 4096
    """Of these, from authors who could not be drawn themselves: fresh keys cost nothing."""
    peers: int = 16_384
    """That have entered."""
    cases: int = 16_384
    """Claims and appeals at a time; the oldest that are decided or over make room."""


@dataclass(frozen=True)
class Duty:
    """``check``: fetch, verify, commit. ``reveal``: the vote committed to. ``state``: publish ``marks`` as a verdict."""

    what: Literal["check", "reveal", "state"]
    case: bytes
    attempt: int
    claim: Claim
    marks: tuple[Mark, ...] = ()
    until: float = math.inf
    """When a commitment comes too late."""
