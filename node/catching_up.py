"""Joining a swarm that is under way: its weights and round, taken over before the first own step.

Rounds go by while the weights travel. A newcomer begins when it is at most ``BEHIND`` rounds (of every fragment) behind the median
of the members, or when the whole download took no longer than ``FRESH_S``; else it takes the weights once more, from whoever is
further by then, at most ``TRIES`` times. Its first round then has weight 0 (``OuterOptimizer.listen``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from statistics import median_low

from node.membership import Membership
from optim import OuterOptimizer
from swarm.errors import NetworkError
from swarm.messages import Member, StateRequest
from swarm.newcomer import ModelDiffersError, Wish, fetch_state
from swarm.snapshot import State

ASKED = 8  # members that are asked for what they hold
BEHIND = 2  # rounds
FRESH_S = 10.0
TRIES = 3
LOOK_S = 5.0  # seconds to look up how far the members are

log = logging.getLogger(__name__)


def catch_up(membership: Membership, model: str, opt: OuterOptimizer, clock: Callable[[], float] = time.monotonic) -> State | None:
    """Slow weights, shared outer state and round of a swarm that is under way; None if nobody else has finished a round yet.

    ``model``: the digest of this node's. The weights fit those of ``opt``, which is left as it is.

    Raises:
        ModelDiffersError: this node's model does not fit.
        NetworkError: it is under way, but nobody hands out weights, or nobody vouches for them.
    """
    state: State | None = None
    for attempt in range(TRIES):
        began = clock()
        newer = _take(membership, model, opt)
        if newer is None:
            return state
        state = newer
        if clock() - began <= FRESH_S:
            return state
        membership.directory.refresh(LOOK_S)
        there = [member.round for member in _others(membership, model)]
        behind = median_low(there) - state.round if there else 0
        if behind <= BEHIND * opt.fragments:
            return state
        log.warning("the weights that came are %d rounds old (%d of %d tries)", behind, attempt + 1, TRIES)
    log.warning("rounds go by faster than the swarm's weights can be fetched: a longer round (--every) would help")
    return state


def _others(membership: Membership, model: str) -> list[Member]:
    """Members from whom weights can be had: who waits in a later round than 0 has resumed, and is about to train."""
    members = membership.directory.members().items()
    there = [member for peer, member in members if peer != membership.identity.peer_id]
    return [member for member in there if member.model == model and member.state in ("waiting", "training") and member.round > 0]


def _take(membership: Membership, model: str, opt: OuterOptimizer) -> State | None:
    fits = model == membership.manifest.model
    others = _others(membership, model)
    if not fits:  # anybody's header will do: the shapes in it name the difference
        others = [m for peer, m in membership.directory.members().items() if peer != membership.identity.peer_id]
    givers = [(member.peer, member.addresses) for member in sorted(others, key=lambda member: -member.round)[:ASKED]]
    request = StateRequest(swarm=membership.swarm, model=model)
    wish = Wish(request, [tuple(tensor.shape) for tensor in opt.slow], opt.shared_shapes, equal=opt.anchored)
    try:
        state = fetch_state(membership.host, wish, givers) if givers else None
    except NetworkError as error:
        if fits:
            why = str(error).rstrip(".")
            raise NetworkError(f"The swarm is training, but its weights could not be had ({why}): try again.") from error
        state = None
    if not fits:
        raise ModelDiffersError("This node's model does not fit the swarm: use the task, options and version of the swarm.")
    if state is None and givers:
        raise NetworkError("The swarm is training but none of its members handed out the weights to start from: try again.")
    return state
