"""The parts of a node, built before it trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shoal.node.config.settings import Settings
from shoal.node.metrics.log import Metrics
from shoal.node.plan.table import memory_of, work_of
from shoal.node.runtime.door import RL
from shoal.node.runtime.refusal_log import RefusalLog
from shoal.node.runtime.result import Result
from shoal.node.task import Task
from shoal.node.training.trainer import Trainer
from shoal.swarm.membership.membership import Membership
from shoal.swarm.topics.status_reporter import StatusReporter
from shoal.swarm.training.member import TrainingMember

if TYPE_CHECKING:
    from shoal.node.rl.rollout_sharing import RolloutSharing
    from shoal.node.verify.service import Verification

UNLISTED = "this swarm is public, but no bootstrap node is named that could list it: start again with --bootstrap and its address"


@dataclass(frozen=True)
class NodeParts:
    """A node in its swarm, ready to train."""

    settings: Settings
    """The user's, with the swarm's in place of the outer, train and task settings."""
    device: torch.device
    membership: Membership
    trainer: Trainer
    member: TrainingMember
    sharing: RolloutSharing | None
    """Present where rollouts are shared."""
    verification: Verification | None
    """Present where nodes verify each other."""
    result: Result
    metrics: Metrics
    refusals: RefusalLog
    status: StatusReporter


def share_rollouts(
    settings: Settings, task: Task, membership: Membership, write: Callable[..., None], notify: Callable[[str], None]
) -> RolloutSharing | None:
    """Return the running sharing of the task's rollouts; None if it has none. Arguments as of ``RolloutSharing``."""
    if settings.task.hooks != RL:
        return None
    from shoal.node.rl.rollout_sharing import RolloutSharing

    return RolloutSharing(task, membership, write, notify, settings.node.ram)


def announce_publicly(membership: Membership, params: int, device: str, log: Callable[[str], None], *, created: bool) -> None:
    """Have this node announce its swarm, if it is public. ``params``: of the model; ``device``: its type; ``created``: by it."""
    manifest = membership.manifest
    if not manifest.public:
        return
    if created and not membership.network.bootstrap:
        log(UNLISTED)
    work = work_of(manifest.outer, params=params, peers=max(manifest.start_when, 2), step_s=1.0)
    memory = memory_of(manifest.outer.method, params, overlapped=bool(work.lag))
    sizes = {"params": params, "round_bytes": work.nbytes, "memory": round(memory or 0)}
    membership.announcer.announce(membership.sealed, **sizes, device=device)
