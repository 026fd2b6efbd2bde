"""The table ``[train]``: what a swarm's peers agree on, and beside it how this node computes its steps."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from shoal.swarm.manifest.outer import TrainSettings

Precision = Literal["float32", "bfloat16", "float16"]
OWN_FLAGS = ("precision", "accumulate", "compile", "recompute", "workers")
"""Settings of `OwnTraining`, each of which is also a flag."""


class OwnTraining(BaseModel):
    """How this node computes its steps. Peers may choose differently: a step is of the same batch whatever is set here."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
    precision: Precision = Field(
        default="float32",
        description="Number format in which this node computes: float32, bfloat16, or float16 (with a scaled loss). The weights "
        "stay as the task made them.",
    )
    accumulate: int = Field(
        default=1,
        ge=1,
        le=65_536,
        description="Equal parts that this node cuts a batch into, one computed after another, which takes less memory.",
    )
    compile: bool = Field(default=False, description="Compile the model with torch.compile on this node.")
    recompute: bool = Field(
        default=False,
        description="Compute activations again in the backward pass on this node: less memory, for about a third more computing.",
    )
    workers: int = Field(
        default=0,
        ge=0,
        le=256,
        description="Processes that draw this node's batches ahead; 0: the training process draws each when it is needed.",
    )

    def flags(self) -> list[str]:
        """Return the flags of `shoal join` that set what differs from the defaults."""
        found: list[str] = []
        for name in OWN_FLAGS:
            value = getattr(self, name)
            if value is True:
                found.append(f"--{name}")
            elif value != type(self).model_fields[name].default:
                found += [f"--{name}", str(value)]
        return found


class TrainTable(TrainSettings, OwnTraining):
    """The whole table ``[train]``: the swarm's settings and this node's own."""

    @property
    def shared(self) -> TrainSettings:
        """The settings that a manifest holds."""
        return TrainSettings(**{name: getattr(self, name) for name in TrainSettings.model_fields})

    def of_swarm(self, fixed: TrainSettings) -> TrainTable:
        """Return this table with the swarm's settings in place of its own, but for what each node chooses for itself."""
        return self.model_copy(update={name: getattr(fixed, name) for name in TrainSettings.model_fields})
