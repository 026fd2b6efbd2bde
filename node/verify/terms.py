"""Terms on which a swarm's nodes claim, made from the creator's settings, and compared at joining.

A snapshot of a policy holds only what is trained, so all nodes must have the same kind of policy,
on the same untrained weights. Loads what verifies only if asked to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.node.config.settings import ConfigError, Settings
from shoal.node.task import Task
from shoal.swarm.settings.verification import Terms

if TYPE_CHECKING:
    from shoal.node.rl.task import RLTask


def make_terms(settings: Settings, task: Task) -> Terms | None:
    """Make the terms of a new swarm; None if nothing is claimed in it.

    ConfigError or VerifyError for a task that cannot be.
    """
    if not settings.verify.audit_rate:
        return None
    from shoal.node.rl.task import RLTask
    from shoal.node.verify.group import dtype_of
    from shoal.node.verify.material import DTYPES
    from shoal.node.verify.proven_group import policy_label
    from shoal.node.verify.snapshot import base_hash, snapshot

    if not isinstance(task, RLTask):
        raise ConfigError("This task writes no completions to claim: pass --task rl with it.")
    # What cannot be claimed is refused here, not at the first claim.
    snapshot(task.policy)
    computed = dtype_of(task.policy)
    dtype = computed if computed in DTYPES else "float32"
    return Terms(
        policy=policy_label(settings.rl.policy),
        base=base_hash(task.policy.module),
        group=settings.rl.group,
        temperature=settings.rl.temperature,
        max_tokens=task.max_tokens,
        dtype=dtype,
    )


def check_terms(terms: Terms, settings: Settings, task: RLTask) -> None:
    """Raise ConfigError if this node's policy is not the one that the swarm's claims are about."""
    from shoal.node.verify.proven_group import policy_label
    from shoal.node.verify.snapshot import base_hash

    own = policy_label(settings.rl.policy)
    if own != terms.policy:
        raise ConfigError(
            f"The swarm verifies the policy {terms.policy!r}, this node was given {own!r}: pass "
            "--policy and where that one is."
        )
    if base_hash(task.policy.module) != terms.base:
        raise ConfigError(
            f"This node's copy of {terms.policy!r} has other weights than the swarm's: take the "
            "same version of the model."
        )
