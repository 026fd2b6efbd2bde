"""Settings of verification (table ``[verify]``), and terms of claims of outputs or inner steps; used by `shoal.node.verify`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from shoal.swarm.wire.fields import Digest


class VerifySettings(BaseModel):
    """Settings of claims and verifiers that all peers of a swarm share."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
    kind: Literal["none", "activations", "training"] = Field(
        default="none",
        description="What nodes claim, and check each other's: none, activations (what they generate, with proofs from hidden "
        "states; for the task rl, whose policy all nodes must then have in common), or training (inner steps, which others do "
        "again; for the other tasks, whose data all nodes must then have in common).",
    )
    audit_rate: float = Field(default=0.1, ge=0, le=1, description="Share of the claims that verifiers are drawn for.")
    claims: int = Field(default=1, ge=1, le=64, description="Claims of each node in a round of verification.")
    round_s: float = Field(
        default=60.0, ge=4, le=86_400,
        description="Seconds of such a round; it begins where Unix time is a multiple of it, so clocks must agree to a few "
        "hundredths.",
    )  # fmt: skip
    stretch: int = Field(
        default=5, ge=1, le=1024, description="training: inner steps of a claim; rounds of the outer optimizer must be longer."
    )
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
        description="activations: dtypes in which claimed completions may be computed, with commas; each is checked in its own.",
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


class StretchTerms(BaseModel):
    """Terms of claimed inner steps. The creator sets them; a manifest has them if training is verified."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
    steps: Annotated[int, Field(ge=1, le=1024)]
    """Inner steps of a claim."""
    dims: Annotated[int, Field(ge=16, le=1 << 14)]
    """Dimensions of the projection in which weights are compared, a power of two."""
    data: Digest
    """Hex SHA-256 of the first batches of some shards: a node with other data would refuse all others' steps."""

    @field_validator("dims")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError("it should be a power of two")
        return value
