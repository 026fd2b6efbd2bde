"""The table ``[train]``: the swarm's settings of training, and those that each node chooses."""

from __future__ import annotations

import json
from typing import Literal

from pydantic import Field

from shoal.node.config.setting_types import SettingsTable
from shoal.swarm.settings.training import TrainSettings

Precision = Literal["float32", "bfloat16", "float16"]


class OwnTraining(SettingsTable):
    """How this node computes its steps.

    Peers may choose differently: a step is of the same batch whatever is set here.
    """

    precision: Precision = Field(
        default="float32",
        description="Number format in which this node computes: float32, bfloat16, or float16 "
        "(with a scaled loss). The weights stay as the task made them.",
    )
    accumulate: int = Field(
        default=1,
        ge=1,
        le=65_536,
        description="Equal parts that this node cuts a batch into, one computed after another, "
        "which takes less memory.",
    )
    compile: bool = Field(
        default=False, description="Compile the model with torch.compile on this node."
    )
    recompute: bool = Field(
        default=False,
        description="Compute activations again in the backward pass on this node: less memory, for "
        "about a third more computing.",
    )
    workers: int = Field(
        default=0,
        ge=0,
        le=256,
        description="Processes that draw this node's batches ahead; 0: the training process draws "
        "each when it is needed.",
    )

    def flags(self) -> list[str]:
        """Return the flags of `shoal join` that set what differs from the defaults."""
        flags: list[str] = []
        for name, field in OwnTraining.model_fields.items():
            value = getattr(self, name)
            if value != field.default:
                flags.append(f"--set=train.{name}={json.dumps(value)}")
        return flags


class TrainTable(TrainSettings, OwnTraining):
    """The whole table ``[train]``: the swarm's settings and this node's own."""

    @property
    def shared(self) -> TrainSettings:
        """The swarm's settings alone."""
        return TrainSettings(**{name: getattr(self, name) for name in TrainSettings.model_fields})

    def of_swarm(self, fixed: TrainSettings) -> TrainTable:
        """Return this table with the swarm's settings in place of its own, but for what each node
        chooses for itself.
        """
        shared = {name: getattr(fixed, name) for name in TrainSettings.model_fields}
        return self.model_copy(update=shared)
