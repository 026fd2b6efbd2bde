"""The setting ``outer.round``: what the length of a round is measured in. How a round is counted is in optim/length.py."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

MAX_TOKENS = 2**53
MIN_S, MAX_S = 0.1, 86_400.0
Unit = Literal["steps", "tokens", "seconds"]


def parse_round(text: str) -> tuple[Unit, float | None]:
    """The unit of a round, and how many; None: as many as ``every`` says (steps), or as the peers' speeds ask for (seconds).

    ``steps``, ``tokens:N``, ``seconds:S`` or ``seconds:auto``. ValueError for anything else, or a number out of bounds.
    """
    if text == "steps":
        return "steps", None
    if text == "seconds:auto":
        return "seconds", None
    if re.fullmatch(r"tokens:[0-9]{1,16}", text):
        tokens = int(text.partition(":")[2])
        if not 1 <= tokens <= MAX_TOKENS:
            raise ValueError(f"a round must have between 1 and {MAX_TOKENS} tokens")
        return "tokens", tokens
    if re.fullmatch(r"seconds:[0-9]{1,9}(\.[0-9]{1,9})?", text):
        seconds = float(text.partition(":")[2])
        if not MIN_S <= seconds <= MAX_S:
            raise ValueError(f"a round must take between {MIN_S:g} and {MAX_S:g} seconds")
        return "seconds", seconds
    raise ValueError("it should be steps, tokens:N, seconds:S or seconds:auto")


def _checked(text: str) -> str:
    parse_round(text)
    return text


RoundSetting = Annotated[str, Field(max_length=32), AfterValidator(_checked)]
