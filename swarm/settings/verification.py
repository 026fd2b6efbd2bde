"""The settings of claims and verifiers, and how claimed completions are made."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from shoal.swarm.wire.envelope import Digest


class VerifySettings(BaseModel):
    """Settings of claims and verifiers that all peers of a swarm share."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
    audit_rate: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of claims that verifiers are drawn for, such as 0.1: nodes claim what "
        "they generate, with proofs from "
        "hidden states, and check each other's; for the task rl, whose policy all must then have "
        "in common. 0: nothing is claimed.",
    )
    round_s: float = Field(
        default=60.0,
        ge=4,
        le=86_400,
        description="Seconds of such a round; it begins where Unix time is a multiple of it, so "
        "clocks must agree to a few "
        "hundredths.",
    )


class Terms(BaseModel):
    """Policy and sampling of claimed completions.

    The creator sets them; a manifest has them if completions are claimed.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
    policy: Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,256}$")]
    """Name of all nodes' policy, without folders."""
    base: Digest
    """Hex SHA-256 of the weights that are not trained, and so not in a snapshot."""
    group: Annotated[int, Field(ge=1, le=64)]
    temperature: Annotated[float, Field(gt=0, le=100)]
    max_tokens: Annotated[int, Field(ge=1, le=16_384)]
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the creator's policy, in which claims may be computed besides float32; each is
    checked in its own.
    """
