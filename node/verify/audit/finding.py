"""Result of checking one claim, for the vote and for people."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

MOST_EVIDENCE = 512  # bytes, as a reveal has room for
_REASON = 200  # characters of the reason that travel


@dataclass(frozen=True)
class Finding:
    """Result of a check. ``reason``: one sentence, also if accepted. ``statistics``: finite, by name. ``seconds`` it took."""

    accepted: bool
    reason: str
    statistics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

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
