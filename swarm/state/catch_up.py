"""Joining a swarm that is under way: its weights and round, taken over before the first own step.

Rounds go by while the weights travel. A newcomer begins when it is at most ``BEHIND`` rounds (of every fragment) behind the median
of the members, or when the whole download took no longer than ``FRESH_S``; else it takes the weights once more, from whoever is
further by then, at most ``TRIES`` times. Its first round then has weight 0 (swarm/follower.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from statistics import median_low

from shoal.optim import OuterOptimizer
from shoal.optim.codecs.base import Shape
from shoal.swarm.errors import NetworkError
from shoal.swarm.membership.membership import OWN_LOOP, Membership
from shoal.swarm.state.snapshot import State
from shoal.swarm.state.sync import ModelDiffersError, StateQuery, fetch_state
from shoal.swarm.wire.member import Member
from shoal.swarm.wire.state import StateRequest

ASKED = 8  # members that are asked for what they hold
BEHIND = 2  # rounds
FRESH_S = 10.0
TRIES = 3
LOOK_S = 5.0  # seconds to look up how far the members are

log = logging.getLogger(__name__)


def catch_up(
    membership: Membership,
    model: str,
    opt: OuterOptimizer,
    clock: Callable[[], float] = time.monotonic,
    *,
    begun: bool = True,
) -> State | None:
    """Slow weights, shared outer state and round of a swarm that is under way; None if nobody else has finished a round yet.

    ``model``: the digest of this node's. The weights fit those of ``opt``, which is left as it is. ``begun`` False: from members in
    their first round too, for who cannot make the weights that the swarm began with.

    Raises:
        ModelDiffersError: this node's model does not fit.
        NetworkError: it is under way, but nobody hands out weights, or nobody vouches for them.
    """
    check_model(membership, model, [tuple(tensor.shape) for tensor in opt.slow])
    state: State | None = None
    for attempt in range(TRIES):
        began = clock()
        newer = _take(membership, model, opt, begun)
        if newer is None:
            return state
        state = newer
        if clock() - began <= FRESH_S:
            return state
        membership.directory.refresh(LOOK_S)
        there = [member.round for member in _givers(membership, model, begun)]
        behind = median_low(there) - state.round if there else 0
        if behind <= BEHIND * opt.fragments:
            return state
        log.warning("the weights that came are %d rounds old (%d of %d tries)", behind, attempt + 1, TRIES)
    log.warning("rounds go by faster than the swarm's weights can be fetched: a longer round (--every) would help")
    return state


def check_model(membership: Membership, model: str, shapes: Sequence[Shape]) -> None:
    """ModelDiffersError, with the difference if it can be had, unless the swarm's model has the digest ``model``."""
    if model == membership.manifest.model:
        return
    givers = [(member.peer, member.addresses) for member in _others(membership)[:ASKED]]
    # Anybody's header will do: the shapes in it name the difference, which raises.
    wish = StateQuery(StateRequest(swarm=membership.swarm, model=model), shapes)
    try:
        if givers:
            fetch_state(membership.host, wish, givers)
    except NetworkError as error:
        log.info("nobody said in what the model differs: %s", error)
    raise ModelDiffersError("This node's model does not fit the swarm: use the task, options and version of the swarm.")


def _others(membership: Membership) -> list[Member]:
    """The furthest first, and of those in the same round the creator."""
    me, first = membership.identity.peer_id, membership.manifest.creator
    others = [member for peer, member in membership.directory.members().items() if peer != me]
    return sorted(others, key=lambda member: (-member.round, member.peer != first))


def _givers(membership: Membership, model: str, begun: bool) -> list[Member]:
    """Members from whom weights can be had: who waits in a later round than 0 has resumed, and is about to train.

    In round 0 who waits in a swarm of own loops has the weights that it begins with; others hand out nothing before they train.
    """
    early = () if begun else ("waiting", "training") if membership.manifest.task == OWN_LOOP else ("training",)
    there = [member for member in _others(membership) if member.model == model]
    return [member for member in there if member.state in (("waiting", "training") if member.round > 0 else early)]


def sources_for(membership: Membership, model: str, begun: bool = True) -> list[tuple[str, tuple[str, ...]]]:
    """Peers to ask for weights, and their addresses; none if nobody else has finished a round."""
    return [(member.peer, member.addresses) for member in _givers(membership, model, begun)[:ASKED]]


def query_for(membership: Membership, model: str, opt: OuterOptimizer) -> StateQuery:
    """What fits ``opt``."""
    request = StateRequest(swarm=membership.swarm, model=model)
    return StateQuery(request, [tuple(tensor.shape) for tensor in opt.slow], opt.shared_shapes, equal=opt.anchored)


def _take(membership: Membership, model: str, opt: OuterOptimizer, begun: bool) -> State | None:
    givers = sources_for(membership, model, begun)
    if not givers:
        return None
    wish = query_for(membership, model, opt)
    try:
        state = fetch_state(membership.host, wish, givers)
    except NetworkError as error:
        why = str(error).rstrip(".")
        raise NetworkError(f"The swarm is training, but its weights could not be had ({why}): try again.") from error
    if state is None:
        raise NetworkError("The swarm is training but none of its members handed out the weights to start from: try again.")
    return state
