"""Start of a member's verification, of the kind in the swarm's manifest, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.node.config.settings import Settings
from shoal.node.task import Shard, Task
from shoal.node.training.trainer import Trainer
from shoal.swarm.manifest.verify import StretchTerms, Terms
from shoal.swarm.membership.membership import Membership

if TYPE_CHECKING:
    from shoal.node.verify.audit.claim_kind import ClaimKind
    from shoal.node.verify.service import Verification


def start_verification(
    settings: Settings, membership: Membership, trainer: Trainer, shard: Shard, fresh: Callable[[], Task]
) -> Verification | None:
    """Start verification before training begins; return None if nothing is claimed in the swarm. ``fresh`` makes the task anew.

    Raises ConfigError or VerifyError if this node cannot take part.
    """
    terms, task = membership.manifest.terms, trainer.task
    if terms is None:
        return None
    from shoal.node.rl.task import RLTask
    from shoal.node.verify.audit.errors import VerifyError
    from shoal.node.verify.audit.network import SwarmNetwork
    from shoal.node.verify.completions.kind import CompletionClaims
    from shoal.node.verify.service import Verification
    from shoal.node.verify.terms import check_terms
    from shoal.node.verify.training.kind import StepClaims
    from shoal.node.verify.training.terms import check_stretch_terms, training_terms

    network = SwarmNetwork(membership, membership.gossip)
    kind: ClaimKind
    if isinstance(terms, Terms) and isinstance(task, RLTask):
        check_terms(terms, settings, task)
        kind = CompletionClaims(settings, terms, task, network)
    elif isinstance(terms, StretchTerms) and not isinstance(task, RLTask):
        check_stretch_terms(terms, membership.manifest, settings.train, task)
        agreed = training_terms(terms, membership.manifest, membership.swarm)
        kind = StepClaims(settings, agreed, trainer, fresh(), shard, network, lambda peer: announced_shard(membership, peer))
    else:
        raise VerifyError("The swarm's manifest is about claims that its task cannot make: ask its creator for another swarm.")
    verification = Verification(settings, kind, network)
    verification.start()
    return verification


def announced_shard(membership: Membership, peer: str) -> Shard | None:
    """Return the shard that ``peer`` announces."""
    member = membership.directory.everyone().get(peer)
    return None if member is None else Shard(member.shard, member.shards, membership.manifest.train.seed)
