"""Verification of a node that has got into its swarm: of the kind that the swarm's manifest says, or none."""

from __future__ import annotations

from collections.abc import Callable

from node.config import Settings
from node.membership import Membership
from node.rl.task import RLTask
from node.task import Shard, Task
from node.trainer import Trainer
from node.verify.completions import Completions
from node.verify.errors import VerifyError
from node.verify.inner_steps import InnerSteps
from node.verify.kind import Kind
from node.verify.network import SwarmNetwork
from node.verify.session import Verification
from node.verify.terms import check_terms
from node.verify.training_terms import check_stretch_terms, training_terms
from swarm.verify_setting import StretchTerms, Terms


def start_verification(
    settings: Settings, membership: Membership, trainer: Trainer, shard: Shard, fresh: Callable[[], Task]
) -> Verification | None:
    """None if nothing is claimed in the swarm. ``fresh`` makes the task once more.

    To be called before training begins. ConfigError or VerifyError if this node cannot take part.
    """
    terms, task = membership.manifest.terms, trainer.task
    if terms is None:
        return None
    network = SwarmNetwork(membership, membership.gossip)
    kind: Kind
    if isinstance(terms, Terms) and isinstance(task, RLTask):
        check_terms(terms, settings, task)
        kind = Completions(settings, terms, task, network)
    elif isinstance(terms, StretchTerms) and not isinstance(task, RLTask):
        check_stretch_terms(terms, membership.manifest, settings.train, task)
        agreed = training_terms(terms, membership.manifest, membership.swarm)
        kind = InnerSteps(settings, agreed, trainer, fresh(), shard, network, lambda peer: announced_shard(membership, peer))
    else:
        raise VerifyError("The swarm's manifest is about claims that its task cannot make: ask its creator for another swarm.")
    verification = Verification(settings, kind, network)
    verification.start()
    return verification


def announced_shard(membership: Membership, peer: str) -> Shard | None:
    """The shard that ``peer`` says that it trains on."""
    member = membership.directory.everyone().get(peer)
    return None if member is None else Shard(member.shard, member.shards, membership.manifest.train.seed)
