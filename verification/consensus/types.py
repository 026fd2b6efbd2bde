"""Types that the protocol and its callers exchange: refusals, limits and duties."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from shoal.verification.consensus.records import Claim, Mark


class Refused(ValueError):
    """Refusal of a record; ``reason`` is one of `REASONS`."""

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True)
class Limits:
    """Bounds on what a peer keeps."""

    claims: int = 256
    """Claims of one author in one round."""
    waiting: int = 16_384
    """Claims and appeals whose verifiers are not drawn yet."""
    strangers: int = 4096
    """Waiting claims and appeals of authors who could not be drawn themselves: fresh keys cost nothing."""
    peers: int = 16_384
    """Peers that have entered."""
    cases: int = 16_384
    """Claims and appeals at a time; the oldest that are decided or over make room."""


@dataclass(frozen=True)
class Duty:
    """Duty of a verifier: ``check`` (fetch, verify, commit), ``reveal`` the vote, or ``state`` the ``marks`` as a verdict."""

    what: Literal["check", "reveal", "state"]
    case: bytes
    attempt: int
    claim: Claim
    marks: tuple[Mark, ...] = ()
    until: float = math.inf
    """Time at which a commitment comes too late."""
