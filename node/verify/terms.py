"""The terms on which a swarm's nodes claim completions: made from the creator's settings, and compared by those who join.

A snapshot of a policy holds only what is trained, so all nodes must have the same kind of policy, on the same untrained weights.
"""

from __future__ import annotations

from node.config import ConfigError, Settings
from node.rl.task import RLTask
from node.task import Task
from node.verify.prover import policy_label
from node.verify.snapshot import base
from swarm.verify_setting import Terms


def make_terms(settings: Settings, task: Task) -> Terms | None:
    """The terms of a new swarm; None if nothing is claimed in it. ConfigError if the task has nothing to claim."""
    if settings.verify.kind == "none":
        return None
    if not isinstance(task, RLTask):
        raise ConfigError("Only completions can be claimed so far: say --task rl with --verify, or leave --verify out.")
    return Terms(
        policy=policy_label(settings.rl.policy),
        base=base(task.policy.module),
        group=settings.rl.group,
        temperature=settings.rl.temperature,
        max_tokens=task.max_tokens,
    )


def check_terms(terms: Terms, settings: Settings, task: RLTask) -> None:
    """ConfigError if this node's policy is not the one that the swarm's claims are about."""
    own = policy_label(settings.rl.policy)
    if own != terms.policy:
        raise ConfigError(
            f"The swarm verifies the policy {terms.policy!r}, this node was given {own!r}: say --policy and where that one is."
        )
    if base(task.policy.module) != terms.base:
        raise ConfigError(
            f"This node's copy of {terms.policy!r} has other weights than the swarm's: take the same version of the model."
        )
