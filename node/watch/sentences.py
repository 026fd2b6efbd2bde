"""Faults and verdicts in words, for the terminal and the page."""

from __future__ import annotations

FAULTS = {
    "no-partner": ("found no partner in a round and kept its own step", "no partner in"),
    "refused": ("refused a contribution that was too far away", "refused"),
    "daemon-restarts": ("had to start its network daemon again", "daemon restarts"),
}
"""Kind of fault -> what happened, and a short name before the count."""


def fault(name: str, kind: str, count: int) -> str:
    """Return a sentence about the peer ``name``; ``count``: of all such faults of its run."""
    what = FAULTS[kind][0] if kind in FAULTS else f"reports a fault of the kind {kind}"
    return f"{name} {what}, {times(count)} so far"


def times(count: int) -> str:
    """Return how often, in words."""
    return {1: "once", 2: "twice"}.get(count, f"{count:,} times")


def fault_label(kind: str, count: int) -> str:
    """Return a few words for the cell of a table."""
    return f"{FAULTS[kind][1] if kind in FAULTS else kind} {count:,}"


def invalid(name: str, count: int, checked: int) -> str:
    """Return a sentence about a claim that the peer ``name`` checked and found invalid."""
    return f"{name} checked a claim of another peer and found it invalid: {count:,} of {checked:,} checks so far"


def banned(name: str, by: str) -> str:
    """Return a sentence about a verdict: enough verifiers found the claims of ``name`` invalid."""
    return f"{name} is banned, as {by} reports: too many of its claims were found invalid"
