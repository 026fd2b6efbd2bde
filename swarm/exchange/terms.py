"""For how many rounds a peer that missed some is left out: `term_end`.

    term_end(missed=1, last=20, fragments=1)    # 24: the next multiple of 8 rounds
    term_end(missed=2, last=20, fragments=1)    # 32: of 32

All nodes name the same round for its return, whenever each of them noticed: otherwise they would
disagree for a while about who is there. Why: docs/internals.md, "Peers that are passed over".
"""

from __future__ import annotations

TERMS = (8, 32, 128, 512)
"""Rounds of each fragment: the first for one that missed once too often, and so on."""
FORGOTTEN = 64
"""Rounds of each fragment after a term for which its misses still count."""
REMEMBERED = 1024
"""Peers whose misses a node remembers, the newest."""


def term_end(missed: int, last: int, fragments: int) -> int:
    """Return the first round in which a peer is no longer left out.

    Args:
        missed: how many misses count, at least 1; beyond the number of `TERMS` the longest one.
        last: the round of the last of them.
        fragments: sent in turn, each in rounds of its own.
    """
    term = TERMS[min(missed, len(TERMS)) - 1] * fragments
    return (last // term + 1) * term
