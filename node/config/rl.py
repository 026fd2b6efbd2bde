"""Settings of a node in a swarm that learns by reinforcement (table ``[rl]``). Only the environment is the swarm's."""

from __future__ import annotations

import os
from pathlib import Path, PurePath
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator


def spec_here(spec: str) -> str:
    """Return ``path/file.py:Class`` with the whole path, if there is that file: its code may change the folder of the process."""
    where, colon, name = spec.rpartition(":")
    file = Path(os.path.expanduser(where))
    return f"{file.absolute()}:{name}" if colon and where.endswith(".py") and file.is_file() else spec


def policy_here(spec: str) -> str:
    """Return ``hf:PATH`` with the whole path, if there is that folder or file; else ``spec``, which may be a name."""
    kind, _, where = spec.partition(":")
    path = Path(os.path.expanduser(where))
    return f"hf:{path.absolute()}" if kind == "hf" and where and path.exists() else spec


class RLSettings(BaseModel):
    """Settings of this node with ``--task rl``."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
    env: Annotated[str, AfterValidator(spec_here)] = Field(
        default="strings",
        min_length=1,
        max_length=4096,
        description="Environment to learn in: strings (built in), sapo9 or a family of reasoning-gym, module:Class, or "
        "path/file.py:Class; its options are those under [task.options].",
    )
    policy: Annotated[str, AfterValidator(policy_here)] = Field(
        default="tiny",
        min_length=1,
        max_length=4096,
        description="Policy that this node trains: tiny or tiny:HABIT (built in), or hf:PATH_OR_NAME (transformers).",
    )
    local: int = Field(default=4, ge=0, le=1024, description="Own groups that this node learns from in a round.")
    external: int = Field(default=4, ge=0, le=1024, description="Other peers' groups that it learns from in a round, at most.")
    group: int = Field(default=8, ge=2, le=64, description="Completions of each question.")
    temperature: float = Field(default=1.0, gt=0, le=100, description="Temperature at which completions are drawn.")
    max_tokens: int = Field(
        default=0, ge=0, le=16_384, description="Largest number of tokens of a completion; 0: what suits the policy."
    )
    loss: Literal["sapo", "tis", "decoupled", "positive", "prime"] | None = Field(
        default=None,
        description="Loss: sapo, tis, decoupled, positive or prime (shoal.optim.rl); not given, what suits the policy.",
    )
    lr: float | None = Field(default=None, gt=0, le=1, description="Learning rate; not given, what suits the policy.")
    warm: int = Field(
        default=400, ge=0, le=1_000_000, description="Steps of the warm start, for the policy tiny, which begins from nothing."
    )
    held_out: int = Field(default=500, ge=1, le=100_000, description="Questions of an evaluation, which nobody trains on.")
    share_only: bool = Field(default=False, description="Share rollouts, but do not learn.")
    learn_only: bool = Field(default=False, description="Learn, but share nothing.")

    @model_validator(mode="after")
    def _does_something(self) -> RLSettings:
        if self.share_only and self.learn_only:
            raise ValueError("share_only and learn_only leave nothing to do: choose one")
        if self.local == 0 and (self.external == 0 or self.share_only):
            raise ValueError("local must be at least 1 for a node that shares only, or has external = 0")
        return self


def env_label(spec: str) -> str:
    """Return the name of an environment in the manifest and in rollouts: without the folder, which differs between machines."""
    where, colon, name = spec.rpartition(":")
    return PurePath(where).name + colon + name
