"""How ``shoal chaos`` starts a node, and as what: without importing what a node needs."""

from __future__ import annotations

PROGRAM = ("-m", "shoal.node.cli.chaos_actor")
HONEST = "honest"
LIES = ("sign-flip", "x1000", "nan", "stale")
"""What hostile nodes may send (node/chaos/actor.py)."""
