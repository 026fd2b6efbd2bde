"""The tables ``[swarm]`` and ``[task]``: what is trained together, besides how it is trained."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from shoal.node.config.setting_types import Name, SettingsTable, spec_here
from shoal.swarm.manifest import Bucket, EpochSeconds


class SwarmSettings(SettingsTable):
    """Settings of a swarm besides its training."""

    name: Name = Field(default="shoal", description="Name of the swarm, for people.")
    start_when: int = Field(
        default=1, ge=1, le=65_536, description="Number of peers at which training begins."
    )
    shards: int = Field(
        default=8,
        ge=1,
        le=65_536,
        description="Number of parts that the data is divided into, one for each peer.",
    )
    invite_only: bool = Field(
        default=False, description="Admit only peers that the creator has invited (shoal invite)."
    )
    public: bool = Field(
        default=False,
        description="Let bootstrap nodes list the swarm (shoal swarms), so that others join it.",
    )
    bucket: Bucket = Field(
        default=0,
        description="Most members that one node reads and is paired with at a time, 4 to 64, such "
        "as 64. That caps each node's cost at that of 30 peers. 0: all members.",
    )
    epoch_s: EpochSeconds = Field(
        default=60.0,
        description="bucket: seconds after which members are reassigned, at least 30; four rounds "
        "mix 4 to 8 % worse than all with all.",
    )

    @field_validator("public")
    @classmethod
    def _open_to_all(cls, public: bool, info: ValidationInfo) -> bool:
        if public and info.data.get("invite_only"):
            raise ValueError("a swarm is public or invite_only, not both")
        return public

    @model_validator(mode="after")
    def _fits_together(self) -> SwarmSettings:
        if not self.bucket and self.epoch_s != type(self).model_fields["epoch_s"].default:
            raise ValueError(
                "epoch_s is a setting of buckets: leave it out, or set bucket too, such as 64"
            )
        return self


class TaskSettings(SettingsTable):
    """Settings of the task."""

    hooks: Annotated[str, AfterValidator(spec_here)] = Field(
        default="text",
        min_length=1,
        max_length=4096,
        description="The task: text or rl (built in), module:Class, or path/file.py:Class.",
    )
    options: dict[str, int | float | str | bool] = Field(
        default_factory=dict, description="Options of the task, handed to its constructor by name."
    )
