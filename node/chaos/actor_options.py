"""Command line of a node of ``shoal chaos``, without the imports of a node."""

from __future__ import annotations

PROGRAM = ("shoal.node.cli.chaos_actor",)
HONEST = "honest"
LIES = ("sign-flip", "x1000", "nan", "stale")
"""False contributions of hostile nodes (`shoal.node.cli.chaos_actor`)."""
