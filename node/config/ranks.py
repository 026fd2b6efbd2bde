"""Settings of a peer of several ranks, each a process with a GPU of its own."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

MAX_RANKS = 64


def _count(value: str) -> str:
    if value != "all" and not (re.fullmatch(r"[1-9][0-9]?", value) and int(value) <= MAX_RANKS):
        raise ValueError(f"it should be all, or a number from 1 to {MAX_RANKS}")
    return value


# A number in TOML is no text.
Count = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value), AfterValidator(_count)]


class RankSettings(BaseModel):
    """Settings of the ranks of this node."""

    gpus: Count | None = Field(
        default=None,
        description="GPUs to train on, a process for each: all, or a number; with the device cpu that many processes. "
        "By default one process.",
    )
    parallel: Literal["ddp", "fsdp"] | None = Field(
        default=None,
        description="How several GPUs share a model: ddp (each holds all of it; the default) or fsdp (each holds a part).",
    )
    max_restarts: int = Field(
        default=3, ge=0, le=1000, description="How often a node of several GPUs starts again after one of its processes died."
    )
