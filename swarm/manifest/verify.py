"""Settings of verification (table ``[verify]``), and terms of claims; used by `shoal.node.verify`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from shoal.swarm.wire.fields import Digest


class VerifySettings(BaseModel):
    """Settings of claims and verifiers that all peers of a swarm share."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
    kind: Literal["none", "activations"] = Field(
        default="none",
        description="What nodes claim, and check each other's: none, or activations (what they generate, with proofs from hidden "
        "states; for the task rl, whose policy all nodes must then have in common).",
    )
    audit_rate: float = Field(default=0.1, ge=0, le=1, description="Share of the claims that verifiers are drawn for.")
    claims: int = Field(default=1, ge=1, le=64, description="Claims of each node in a round of verification.")
    round_s: float = Field(
        default=60.0, ge=4, le=86_400,
        description="Seconds of such a round; it begins where Unix time is a multiple of it, so clocks must agree to a few "
        "hundredths.",
    )  # fmt: skip
    verifiers: int = Field(
        default=3, ge=3, le=31, description="Verifiers drawn for a claim, an odd number; their majority decides."
    )
    planted: float = Field(
        default=0.05, ge=0, le=0.5,
        description="Share of claims that are made wrong on purpose, so that approving without looking does not pay.",
    )  # fmt: skip
    rate: float = Field(default=1e-4, gt=0, le=0.5, description="Rate of false alarms at which a claim is refused.")
    dtypes: str = Field(
        default="float32", pattern=r"^(float32|bfloat16|float16)(,(float32|bfloat16|float16)){0,2}$",
        description="Dtypes in which claimed completions may be computed, with commas; each is checked in its own.",
    )  # fmt: skip

    @field_validator("verifiers")
    @classmethod
    def _odd(cls, value: int) -> int:
        if value % 2 == 0:
            raise ValueError("it should be odd, so that a vote cannot be a tie")
        return value


class Terms(BaseModel):
    """Policy and sampling of claimed completions. The creator sets them; a manifest has them if completions are claimed."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
    policy: Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,256}$")]
    """Name of all nodes' policy, without folders."""
    base: Digest
    """Hex SHA-256 of the weights that are not trained, and so not in a snapshot."""
    group: Annotated[int, Field(ge=1, le=64)]
    temperature: Annotated[float, Field(gt=0, le=100)]
    max_tokens: Annotated[int, Field(ge=1, le=16_384)]
