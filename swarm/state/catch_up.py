"""Joining a swarm that is under way: its weights and round are fetched before the first own step.

Rounds go by while the weights travel. A newcomer begins when it is at most `BEHIND` rounds (of every fragment) behind the median of
the members, or when the download took no longer than `FRESH_S`; otherwise it fetches the weights again, at most `TRIES` times. Its
first round then has weight 0 (`shoal.swarm.training.outer_sync`).
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from statistics import median_low

import torch

from shoal.optim import OuterOptimizer
from shoal.optim.codecs.base import Shape
from shoal.optim.schedule.schedule import Send
from shoal.swarm.errors import NetworkError
from shoal.swarm.exchange.contribution import parameters_digest
from shoal.swarm.membership.membership import OWN_LOOP, Membership, MemberView
from shoal.swarm.p2p.host import Host
from shoal.swarm.p2p.multiaddr import host_of, known_first, of_ranges
from shoal.swarm.state.download import Peer
from shoal.swarm.state.snapshot import State
from shoal.swarm.state.sync import ModelDiffersError, StateQuery, fetch_state
from shoal.swarm.wire.member import Member
from shoal.swarm.wire.state import StateRequest


def in_step(opt: OuterOptimizer, state: State) -> int:
    """Return the first round, not before that of ``state``, in which the swarm sends the fragment that ``opt`` sends next.

    Rounds of one fragment are as many apart as there are fragments. In another round nobody else would send it.
    """
    fragments = len(state.applied)
    if fragments < 2:
        return state.round
    later = itertools.chain.from_iterable(opt.schedule.at(opt.position + number) for number in range(1, opt.schedule.every + 1))
    fragment = next((action.fragment for action in later if isinstance(action, Send)), 0)
    last = state.applied[fragment]
    return state.round + ((last if last >= 0 else fragment) - state.round) % fragments


ASKED = 8  # members that are asked for what they hold
DIALLED = 128  # members that are dialled to learn where they are, if there are more than are asked
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
    """Fetch the state of a swarm that is under way; return None if nobody else has finished a round yet.

    The state fits ``opt``, which is left as it is. ``model``: the digest of this node's. ``begun`` False: accept members in their
    first round too, because this node cannot make the weights that the swarm began with; of those what it holds is not fetched.

    Raises:
        ModelDiffersError: this node's model does not fit.
        NetworkError: it is under way, but nobody hands out weights, or no second peer confirms them.
    """
    check_model(membership, model, opt.shapes)
    state: State | None = None
    for attempt in range(TRIES):
        began = clock()
        newer = _fetch(membership, model, opt, begun)
        if newer is None:
            return state
        state = newer
        if clock() - began <= FRESH_S:
            return state
        membership.directory.refresh(LOOK_S)
        behind = usual_round(_able_in(membership, model, begun), membership.host.met) - state.round
        if behind <= BEHIND * opt.fragments:
            return state
        log.warning("the weights that were fetched are %d rounds old (%d of %d tries)", behind, attempt + 1, TRIES)
    log.warning("rounds go by faster than the swarm's weights can be fetched: a longer round (--every) would help")
    return state


def check_model(membership: Membership, model: str, shapes: Sequence[Shape]) -> None:
    """Raise ModelDiffersError unless the swarm's model has the digest ``model``; it names the difference if a member tells it."""
    if model == membership.manifest.model:
        return
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        if membership.manifest.model == parameters_digest((dtype, shape) for shape in shapes):
            raise ModelDiffersError(
                f"This node's parameters are not of the dtype of the swarm's, {dtype}: make them so, by model.to({dtype})."
            )
    # Any member's header will do: the shapes in it name the difference, which raises.
    sources = _addressed(in_order(list(_others(membership).values()), membership.host.met, membership.manifest.creator))
    query = StateQuery(StateRequest(swarm=membership.swarm, model=model), shapes)
    try:
        if sources:
            fetch_state(membership.host, query, sources)
    except NetworkError as error:
        log.info("no member reported how the model differs: %s", error)
    raise ModelDiffersError("This node's model does not fit the swarm: use the task, options and version of the swarm.")


def sources_in(host: Host, members: Mapping[str, Member], model: str, creator: str) -> list[Peer]:
    """Return the members to ask for weights, at most `ASKED`; none if nobody has finished a round.

    If there are more they are dialled first: where a record says that its peer is costs nothing, and so does a key.
    """
    return _located(host, _able(members, model), creator)


def sources_for(membership: MemberView, model: str) -> list[Peer]:
    """Return the other members to ask for weights, dialled or not; none if nobody else has finished a round."""
    return _addressed(in_order(_able_in(membership, model, True), membership.host.met, membership.manifest.creator))


def query_for(membership: MemberView, model: str, opt: OuterOptimizer) -> StateQuery:
    """Return the query for a state that fits ``opt``."""
    request = StateRequest(swarm=membership.swarm, model=model)
    return StateQuery(request, opt.shapes, opt.shared_shapes, equal=opt.anchored, fragments=opt.fragments)


def _others(membership: MemberView) -> dict[str, Member]:
    return {peer: member for peer, member in membership.directory.members().items() if peer != membership.identity.peer_id}


def usual_round(members: Iterable[Member], met: Mapping[str, str], partners: Collection[str] = ()) -> int:
    """Return the median of the members' rounds: of those among ``partners``, or else one of each address range at which some were
    ``met``, or else of all; 0 if there are none.
    """
    rounds = [(member.peer, member.round) for member in members]
    return median_low([round for peer, round in rounds if peer in partners] or of_ranges(rounds, met) or [0])


def in_order(members: Sequence[Member], met: Mapping[str, str], creator: str, partners: Collection[str] = ()) -> list[Member]:
    """Sort members by whom to ask first: ``partners``, and of the others the latest by their rounds, the creator, those that were
    ``met``, and one of each address range in turn. All from the usual round on count alike, so that lies gain nothing.
    """
    claimed = [(member.peer, host_of(next(iter(member.addresses), ""))) for member in members]
    turn = {peer: place for place, peer in enumerate(known_first(claimed, met))}
    usual = usual_round(members, met, partners)
    return sorted(members, key=lambda m: (m.peer not in partners, -min(m.round, usual), m.peer != creator, turn[m.peer]))


def _able(members: Mapping[str, Member], model: str, early: Sequence[str] = ()) -> list[Member]:
    """Return the members that can hand out weights. ``early``: states in which they can before they have finished a round.

    A member that waits in a later round than 0 has resumed, and is about to train.
    """
    fitting = [member for member in members.values() if member.model == model]
    return [m for m in fitting if m.state in (("waiting", "training") if m.round > 0 else early)]


def _able_in(membership: MemberView, model: str, begun: bool) -> list[Member]:
    # In a swarm of own loops a member that waits in round 0 has the first weights; others have none before they train.
    early = () if begun else ("waiting", "training") if membership.manifest.task == OWN_LOOP else ("training",)
    return _able(_others(membership), model, early)


def _located(host: Host, able: Sequence[Member], creator: str) -> list[Peer]:
    if len(able) > ASKED:
        drawn = random.sample(able, min(DIALLED, len(able)))
        own = ((m.peer, [address for address in m.addresses if address.endswith(f"/p2p/{m.peer}")]) for m in drawn)
        try:
            host.call(host.locate(own, LOOK_S), 3 * LOOK_S)
        except NetworkError as error:
            log.info("the members were not dialled before they are asked: %s", error)
    return _addressed(in_order(able, host.met, creator))


def _addressed(members: Sequence[Member]) -> list[Peer]:
    return [(member.peer, member.addresses) for member in members[:ASKED]]


def _fetch(membership: Membership, model: str, opt: OuterOptimizer, begun: bool) -> State | None:
    sources = _located(membership.host, _able_in(membership, model, begun), membership.manifest.creator)
    if not sources:
        return None
    try:
        held = None if begun else State(opt.round, opt.slow, opt.shared)
        state = fetch_state(membership.host, query_for(membership, model, opt), sources, held)
    except NetworkError as error:
        why = str(error).rstrip(".")
        raise NetworkError(f"The swarm is training, but its weights could not be had ({why}): try again.") from error
    if state is None:
        raise NetworkError("The swarm is training but none of its members served the weights to start from: try again.")
    return state
