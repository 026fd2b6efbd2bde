"""Rates of a whole swarm, drawn over time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.node.watch.curves import Curve

RATES = ("steps_per_s", "tokens_per_s", "bytes_sent_per_s", "bytes_received_per_s")
"""Of the totals of a swarm."""
SAMPLE_S = 1.0
"""Seconds between two points."""


class RateCurves:
    """Curve of each of `RATES`, by seconds since the first status."""

    def __init__(self) -> None:
        self.curves = {name: Curve() for name in RATES}
        self._sampled = float("-inf")

    def is_due(self, now: float) -> bool:
        return now - self._sampled >= SAMPLE_S

    def add(self, now: float, begun: float, totals: Mapping[str, Any]) -> None:
        self._sampled = now
        for name, curve in self.curves.items():
            curve.add(now - begun, float(totals[name]))
