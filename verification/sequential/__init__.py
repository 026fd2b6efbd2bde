"""Odds against a peer from all its claims: a test martingale, alarmed at a stated rate over the peer's whole life."""
