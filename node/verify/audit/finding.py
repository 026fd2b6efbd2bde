"""Result of checking one claim, for the vote and for people."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from shoal.swarm.errors import ShoalError
from shoal.verification.calibration.calibration import Honest, Pair
from shoal.verification.fingerprints.fingerprint import Evidence

# Errors of this node while it proves or checks; a prover's faults are findings, never errors.


class VerifyError(ShoalError):
    """Failure to make or read a claim, a snapshot or a calibration on this node."""


class NotCheckable(VerifyError):
    """Inability of this node to judge a claim: no calibration, no such policy, or no snapshot."""


class NotCalibrated(NotCheckable):
    """Missing calibration of the policy for the dtypes of prover and verifier."""


MOST_EVIDENCE = 512  # bytes, as a reveal has room for
_REASON = 200  # characters of the reason that travel


@dataclass(frozen=True)
class Measured:
    """Evidence of a claim, with the honest claims of ``pair`` that it is compared with. ``kernel``: as the author says."""

    pair: Pair
    honest: Honest
    evidence: Evidence
    kernel: str


@dataclass(frozen=True)
class Finding:
    """Result of a check. ``reason``: one sentence, also if accepted. ``statistics``: finite, by name. ``seconds`` it took.
    ``measured``: for the odds over all claims of the author; empty where these are not computed.
    """

    accepted: bool
    reason: str
    statistics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    measured: tuple[Measured, ...] = ()

    @property
    def evidence(self) -> bytes:
        """At most 512 bytes of JSON: the reason, cut, and as many figures as fit."""
        reason, figures = ascii(self.reason[:_REASON])[1:-1][:_REASON], dict(self.statistics)
        while True:
            said = {"accepted": self.accepted, "reason": reason, **{name: float(f"{value:.4g}") for name, value in figures.items()}}
            data = json.dumps(said, separators=(",", ":")).encode()
            if len(data) <= MOST_EVIDENCE:
                return data
            if not figures:
                reason = reason[: len(reason) // 2]
            else:
                figures.popitem()
