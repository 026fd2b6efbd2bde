"""The table ``[rl]``: reinforcement learning of this node."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from shoal.node.config.setting_types import SettingsTable, spec_here
from shoal.node.home import expanded
from shoal.optim.methods import one_of
from shoal.swarm.identity import is_peer_id

MAX_SPEC_CHARS = 4096
CREATOR = "creator"


def served_by(spec: str) -> tuple[str, str]:
    """Return a policy, and the URL of its server, of ``POLICY@URL``; an empty text without one."""
    policy, at, url = spec.partition("@http")
    return policy, at[1:] + url


def policy_here(spec: str) -> str:
    """Return ``hf:PATH`` with the whole path, if there is that folder or file; else ``spec``, which
    may be a name.
    """
    policy, url = served_by(spec)
    kind, _, where = policy.partition(":")
    path = Path(expanded(where))
    if kind != "hf" or not where or not path.exists():
        return spec
    server = f"@{url}" if url else ""
    return f"hf:{path.absolute()}{server}"


def _loss(name: str) -> str:
    if ":" in name:
        return spec_here(name)
    # Loads torch.
    from shoal.optim.rl.losses import LOSSES

    if name not in LOSSES:
        raise ValueError(
            f"there is no loss {name[:64]!r}: choose {one_of(LOSSES)}, or write your own as "
            "path/file.py:function"
        )
    return name


def _leader(peer: str) -> str:
    if peer != CREATOR and not is_peer_id(peer):
        raise ValueError(
            f"{peer[:64]!r} is no peer: write its id, as shoal status has it, or creator"
        )
    return peer


class RLSettings(SettingsTable):
    """Settings of this node with ``--task rl``."""

    env: Annotated[str, AfterValidator(spec_here)] = Field(
        default="strings",
        min_length=1,
        max_length=MAX_SPEC_CHARS,
        description="Environment to learn in: strings (built in), sapo9 or a family of "
        "reasoning-gym, module:Class, or path/file.py:Class; its options are those under "
        "[task.options].",
    )
    policy: Annotated[str, AfterValidator(policy_here)] = Field(
        default="tiny",
        min_length=1,
        max_length=MAX_SPEC_CHARS,
        description="Policy that this node trains: tiny[:HABIT[:STEPS]] (built in; so many steps "
        "of a warm start, 400), or hf:PATH_OR_NAME[@URL] (transformers; the URL of a server of the "
        "model, vLLM or llama.cpp's, to draw completions).",
    )
    local: int = Field(
        default=4, ge=0, le=1024, description="Own groups that this node learns from in a round."
    )
    external: int = Field(
        default=4,
        ge=0,
        le=1024,
        description="Other peers' groups that it learns from in a round, at most.",
    )
    group: int = Field(default=8, ge=2, le=64, description="Completions of each question.")
    temperature: float = Field(
        default=1.0, gt=0, le=100, description="Temperature at which completions are drawn."
    )
    max_tokens: int = Field(
        default=0,
        ge=0,
        le=16_384,
        description="Largest number of tokens of a completion; 0: what suits the policy.",
    )
    loss: Annotated[str, AfterValidator(_loss)] | None = Field(
        default=None,
        max_length=MAX_SPEC_CHARS,
        description="Loss, by its name in shoal.optim.rl.losses.LOSSES, or path/file.py:function; "
        "not given, what suits the policy.",
    )
    per: Literal["token", "completion", "completion_sum", "max_tokens"] | None = Field(
        default=None,
        description="Mean of the loss over tokens, over completions of their means or of their "
        "sums, or the last by max_tokens; not given, as in the paper of the loss.",
    )
    delta: float | None = Field(
        default=None,
        gt=1,
        description="Largest ratio of new policy to old that counts where the advantage is "
        "negative (two-sided clipping); not given, that of the loss.",
    )
    scale_rewards: Literal["group", "batch", "none"] = Field(
        default="group",
        description="Divide advantages by the standard deviation of the rewards of the group, of "
        "all of an update (batch), or by nothing.",
    )
    deviation: Literal["population", "sample"] = Field(
        default="population", description="Which standard deviation; trl's is that of the sample."
    )
    kl_coef: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the KL divergence to the policy as it was made (trl's beta).",
    )
    entropy_coef: float = Field(
        default=0.0, ge=0, description="Weight of the mean entropy of tokens, which is rewarded."
    )
    off_policy_mask: float | None = Field(
        default=None,
        ge=0,
        description="Leave out completions worse than their group where the mean of "
        "log(writer's / own probability) is above this; not given, none.",
    )
    lr: float | None = Field(
        default=None, gt=0, le=1, description="Learning rate; not given, what suits the policy."
    )
    held_out: int = Field(
        default=500,
        ge=1,
        le=100_000,
        description="Questions of an evaluation, which nobody trains on.",
    )
    only: Literal["share", "learn"] | None = Field(
        default=None,
        description="share: share rollouts, but do not learn; learn: learn, but share nothing. By "
        "default both.",
    )

    publish: bool = Field(
        default=False,
        description="Publish the policy after each round, for nodes that follow this one; what "
        "others download are patches.",
    )
    follow: Annotated[str, AfterValidator(_leader)] | None = Field(
        default=None,
        description="Take over the policy of this peer (its id, or creator), which has the same "
        "rl.policy and rl.publish: when this node begins, and with only = share in each round. "
        "Not with averaging of weights.",
    )

    @model_validator(mode="after")
    def _does_something(self) -> RLSettings:
        if self.local == 0 and (self.external == 0 or self.only == "share"):
            raise ValueError(
                "local must be at least 1 for a node that shares only, or has external = 0"
            )
        if self.publish and self.follow:
            raise ValueError("a node that follows another publishes no policy: leave publish out")
        return self
