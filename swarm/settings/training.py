"""The settings of the training run that all peers of a swarm share."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shoal.swarm.wire.envelope import MAX_COUNT

MAX_LR = 10
"""The largest learning rate of Shoal's own inner optimizers."""


class TrainSettings(BaseModel):
    """Settings of the training run."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
    steps: int = Field(
        default=0,
        ge=0,
        le=MAX_COUNT,
        description="Inner steps of every node; 0 trains until it is stopped.",
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**63,
        description="Seed of the first weights, the shards and the pairing.",
    )
    eval_every: int = Field(
        default=0,
        ge=0,
        le=MAX_COUNT,
        description="Inner steps between two evaluations; 0: only at the start and end.",
    )
    optimizer: Literal["task", "adamw", "muon"] = Field(
        default="task",
        description="Inner optimizer: the task's own (task), adamw (betas 0.9 and 0.99), or muon "
        "(for the matrices of the hidden "
        "layers, with adamw, betas 0.9 and 0.95, for the rest).",
    )
    lr: float | None = Field(
        default=None,
        gt=0,
        le=MAX_LR,
        description="adamw, muon: peak learning rate; not given, 3e-4 (muon: 0.02).",
    )
    weight_decay: float | None = Field(
        default=None,
        ge=0,
        le=10,
        description="adamw, muon: weight decay; not given, 0.01 (muon: 0).",
    )
    schedule: Literal["task", "constant", "cosine", "wsd"] = Field(
        default="task",
        description="Learning rate after the warm-up: the task's own schedule (task), constant, "
        "cosine (down to a tenth at the "
        "last step), or wsd (constant, and down to 0 over the last fifth of the steps).",
    )
    warmup: int = Field(
        default=0,
        ge=0,
        le=MAX_COUNT,
        description="Inner steps up to the full learning rate, in a schedule other than the "
        "task's.",
    )
    clip: float = Field(
        default=0.0,
        ge=0,
        le=1e9,
        description="Largest norm of all gradients of a step together, which are scaled down to "
        "it; 0: any.",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> TrainSettings:
        given = [name for name in ("lr", "weight_decay") if getattr(self, name) is not None]
        if given and self.optimizer == "task":
            raise ValueError(
                f"the task's own optimizer has its own {given[0]}: set it as the task wants it, or "
                "choose adamw"
            )
        if self.warmup and self.schedule == "task":
            raise ValueError(
                "the task's own schedule has its own warmup: leave it out, or choose constant, "
                "cosine or wsd"
            )
        if self.schedule in ("cosine", "wsd") and not self.steps:
            raise ValueError(
                f"the schedule {self.schedule} leads to an end: set steps, or choose constant"
            )
        return self
