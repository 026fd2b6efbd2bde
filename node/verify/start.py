"""Start of a member's verification by the terms in the swarm's manifest.

Loads what verifies only if asked to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.node.config.settings import Settings
from shoal.node.task import Task
from shoal.node.verify.terms import check_terms
from shoal.swarm.membership.membership import Membership

if TYPE_CHECKING:
    from shoal.node.verify.service import Verification


def start_verification(
    settings: Settings, membership: Membership, task: Task
) -> Verification | None:
    """Start verification before training begins; return None if nothing is claimed in the swarm.

    Raises ConfigError or VerifyError if this node cannot take part.
    """
    terms = membership.manifest.terms
    if terms is None:
        return None
    from shoal.node.rl.task import RLTask
    from shoal.node.verify.completion_claims import CompletionClaims
    from shoal.node.verify.errors import VerifyError
    from shoal.node.verify.service import Verification
    from shoal.node.verify.swarm_network import SwarmNetwork

    if not isinstance(task, RLTask):
        raise VerifyError(
            "The swarm's manifest is about claims that its task cannot make: ask its creator for "
            "another swarm."
        )
    network = SwarmNetwork(membership, membership.gossip)
    check_terms(terms, settings, task)
    verification = Verification(settings, CompletionClaims(settings, terms, task, network), network)
    verification.start()
    return verification
