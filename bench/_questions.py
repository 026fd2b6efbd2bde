"""Questions to a language model that follow from their number alone, so that no edit of a page
changes what was measured.
"""

from __future__ import annotations

import hashlib

WORDS = (
    "old new red blue quiet busy small tall broken golden frozen hidden lazy brave hungry wooden",
    "harbour engine garden teacher river robot kitchen mountain doctor letter castle sailor window "
    "forest market piano",
    "wild clean dark bright early late honest clever tired sharp soft rusty silver distant gentle "
    "strange",
    "baker bridge dragon farmer island captain library winter singer planet hunter mirror station "
    "painter valley clock",
)


def question(number: int) -> str:
    """Return question ``number``, one of 65,536: which one, a hash of the number says."""
    chosen = hashlib.sha256(b"shoal bench question %d" % number).digest()
    a, b, c, d = (words.split()[byte % 16] for words, byte in zip(WORDS, chosen, strict=False))
    asked = f"Write three sentences about the {a} {b} and the {c} {d}"
    return f"{asked}, as a good friend would tell them after dinner, in the evening:"
