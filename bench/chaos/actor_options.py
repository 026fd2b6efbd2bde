"""Command line of a node of ``python -m bench.chaos``, without the imports of a node."""

from __future__ import annotations

PROGRAM = ("bench.chaos.actor",)
HONEST = "honest"
LIES = ("sign-flip", "x1000", "nan", "stale")
"""False contributions of hostile nodes (`bench.chaos.actor`)."""
