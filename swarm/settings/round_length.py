"""How long a round is, as a setting says it: in steps, tokens or seconds.

parse_round("tokens:65536")     # ("tokens", 65536)
"""

from __future__ import annotations

import re
from typing import Literal

MAX_ROUND_TOKENS = 2**53
MIN_ROUND_S = 0.1
MAX_ROUND_S = 86_400.0

Unit = Literal["steps", "tokens", "seconds"]


def parse_round(text: str) -> tuple[Unit, float | None]:
    """Return the unit of a round and its length; None: ``every`` steps, or seconds that follow the
    peers' speeds.

    ``text``: ``steps``, ``tokens:N``, ``seconds:S`` or ``seconds:auto``. Raises ValueError for
    anything else, or a number out of bounds.
    """
    if text == "steps":
        return "steps", None
    if text == "seconds:auto":
        return "seconds", None
    if re.fullmatch(r"tokens:[0-9]{1,16}", text):
        tokens = int(text.partition(":")[2])
        if not 1 <= tokens <= MAX_ROUND_TOKENS:
            raise ValueError(f"a round must have between 1 and {MAX_ROUND_TOKENS} tokens")
        return "tokens", tokens
    if re.fullmatch(r"seconds:[0-9]{1,9}(\.[0-9]{1,9})?", text):
        seconds = float(text.partition(":")[2])
        if not MIN_ROUND_S <= seconds <= MAX_ROUND_S:
            raise ValueError(
                f"a round must take between {MIN_ROUND_S:g} and {MAX_ROUND_S:g} seconds"
            )
        return "seconds", seconds
    raise ValueError("it should be steps, tokens:N, seconds:S or seconds:auto")
