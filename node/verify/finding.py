"""What a check of a claim found, and what of it travels with a vote."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from shoal.verification.calibration import Honest, Pair
from shoal.verification.fingerprints.fingerprint import Evidence

MAX_EVIDENCE_BYTES = 512
"""As a reveal has room for."""
MAX_REASON_CHARS = 200
"""Of the reason that travel."""


@dataclass(frozen=True)
class Measured:
    """Evidence of a claim, with the honest claims of ``pair`` that it is compared with.

    ``kernel``: as the author says.
    """

    pair: Pair
    honest: Honest
    evidence: Evidence
    kernel: str


@dataclass(frozen=True)
class Finding:
    """Result of a check.

    ``reason``: one sentence, also if accepted. ``statistics``: finite, by name. ``seconds`` it
    took. ``measured``: for the odds over all claims of the author; empty where these are not
    computed.
    """

    accepted: bool
    reason: str
    statistics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    measured: tuple[Measured, ...] = ()

    @property
    def evidence(self) -> bytes:
        """At most 512 bytes of JSON: the reason, cut, and as many figures as fit."""
        reason = ascii(self.reason[:MAX_REASON_CHARS])[1:-1][:MAX_REASON_CHARS]
        figures = {name: float(f"{value:.4g}") for name, value in self.statistics.items()}
        while True:
            said = {"accepted": self.accepted, "reason": reason, **figures}
            data = json.dumps(said, separators=(",", ":")).encode()
            if len(data) <= MAX_EVIDENCE_BYTES:
                return data
            if figures:
                figures.popitem()
            else:
                reason = reason[: len(reason) // 2]
