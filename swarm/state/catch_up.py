"""Taking over a swarm's weights to join it while it is under way.

Rounds go by while the weights are sent. A newcomer begins when it is at most `BEHIND_ROUNDS` (of
every fragment) behind the median of the members, or when the download was quick; otherwise it
fetches the weights again. Its first round then has weight 0 (`shoal.swarm.training.member`).
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from statistics import median_low

import torch

from shoal.optim import OuterOptimizer
from shoal.optim.parameters import AveragedParameters
from shoal.optim.schedule.schedules import Send
from shoal.swarm.errors import NetworkError
from shoal.swarm.exchange.contribution import (
    Outline,
    outline_digest,
)
from shoal.swarm.membership.membership import OWN_LOOP, Membership
from shoal.swarm.p2p.addresses import known_first, of_ranges
from shoal.swarm.p2p.host import Host
from shoal.swarm.state.download import Peer
from shoal.swarm.state.progress import FetchProgress
from shoal.swarm.state.query import ModelDiffersError, StateQuery
from shoal.swarm.state.snapshot import State
from shoal.swarm.state.sync import fetch_state
from shoal.swarm.wire.messages import Member, StateRequest

log = logging.getLogger(__name__)


def in_step(opt: OuterOptimizer, state: State) -> int:
    """Return the first round, not before that of ``state``, in which the swarm sends the fragment
    that ``opt`` sends next.

    Rounds of one fragment are as many apart as there are fragments. In another round nobody else
    would send it.
    """
    fragments = len(state.applied)
    if fragments < 2:
        return state.round
    fragment = _next_sent(opt)
    last = state.applied[fragment]
    its_round = last if last >= 0 else fragment
    return state.round + (its_round - state.round) % fragments


def _next_sent(opt: OuterOptimizer) -> int:
    """Return the fragment that ``opt`` sends next."""
    for number in range(1, opt.schedule.every + 1):
        for action in opt.schedule.at(opt.position + number):
            if isinstance(action, Send):
                return action.fragment
    return 0


MAX_ASKED = 8  # members that are asked for what they hold
MAX_DIALLED = 128  # members that are dialled to learn where they are, if there are more than that
BEHIND_ROUNDS = 2  # of every fragment, behind the others, at which a newcomer may begin
FRESH_S = 10.0  # a download that took no longer is not compared with the others' rounds
TRIES = 3
LOOK_S = 5.0  # to look up how far the members are


def catch_up(
    membership: Membership,
    model: str,
    opt: OuterOptimizer,
    clock: Callable[[], float] = time.monotonic,
    *,
    begun: bool = True,
    watch: Callable[[FetchProgress], None] = lambda progress: None,
) -> State | None:
    """Fetch the state of a swarm that is under way; return None if nobody else has finished a round
    yet.

    The state fits ``opt``, which is left as it is. ``model``: the digest of this node's. ``begun``
    False: accept members in their first round too, because this node cannot make the weights that
    the swarm began with; of those what it holds is not fetched. ``watch`` is given the progress of
    each fetch as it begins.

    Raises ModelDiffersError; NetworkError if it is under way, but nobody hands out weights, or no
    second peer confirms them.
    """
    check_model(membership, model, opt.parameters)
    state: State | None = None
    for attempt in range(TRIES):
        began = clock()
        newer = _fetch_weights(membership, model, opt, begun, watch)
        if newer is None:
            return state
        state = newer
        if clock() - began <= FRESH_S:
            return state
        membership.directory.refresh(LOOK_S)
        able = _able(_others(membership), model, _early(membership, begun))
        behind = usual_round(able, membership.host.met) - state.round
        if behind <= BEHIND_ROUNDS * opt.fragments:
            return state
        log.warning(
            "the weights that were fetched are %d rounds old (%d of %d tries)",
            behind,
            attempt + 1,
            TRIES,
        )
    log.warning(
        "rounds go by faster than the swarm's weights can be fetched: a longer round (--every) "
        "would help"
    )
    return state


def check_model(membership: Membership, model: str, parameters: AveragedParameters) -> None:
    """Raise ModelDiffersError unless the swarm's model has these parameters; it names the
    difference if a member tells it.

    ``model``: their digest.
    """
    if model == membership.manifest.model:
        return
    outline = Outline.of(parameters)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        if membership.manifest.model == outline_digest(outline, [dtype] * len(parameters)):
            raise ModelDiffersError(
                f"This node's parameters are not of the dtype of the swarm's, {dtype}: make them "
                f"so, by model.to({dtype})."
            )
    # Any member's header will do: the names and shapes in it tell the difference, which raises.
    others = list(_others(membership).values())
    sources = _addressed(in_order(others, membership.host.met, membership.manifest.creator))
    query = StateQuery(
        StateRequest(swarm=membership.swarm, model=model), outline.shapes, names=outline.names
    )
    try:
        if sources:
            fetch_state(membership.host, query, sources)
    except NetworkError as error:
        log.info("no member reported how the model differs: %s", error)
    if not any(outline.names):
        raise ModelDiffersError(
            "This node's model does not fit the swarm: hand in the module as state, for a list of "
            "parameters has no names, or use the swarm's model."
        )
    raise ModelDiffersError(
        "This node's model does not fit the swarm: names, shapes or types of its parameters "
        "differ, and no member told which; use the swarm's model, task, options and version, or "
        "compare them while a member runs (shoal doctor LINK)."
    )


def sources_in(
    host: Host, members: Mapping[str, Member], model: str, creator: str, early: Sequence[str] = ()
) -> list[Peer]:
    """Return the members to ask for weights, at most `MAX_ASKED`; none if nobody has finished a
    round, or is in an ``early`` state.

    If there are more they are dialled first: where a record says that its peer is costs nothing,
    and so does a key.
    """
    able = _able(members, model, early)
    if len(able) > MAX_ASKED:
        own = []
        for member in random.sample(able, min(MAX_DIALLED, len(able))):
            suffix = f"/p2p/{member.peer}"
            own.append((member.peer, [one for one in member.addresses if one.endswith(suffix)]))
        try:
            host.call(host.locate(own, LOOK_S), 3 * LOOK_S)
        except NetworkError as error:
            log.info("the members were not dialled before they are asked: %s", error)
    return _addressed(in_order(able, host.met, creator))


def query_for(membership: Membership, model: str, opt: OuterOptimizer) -> StateQuery:
    request = StateRequest(swarm=membership.swarm, model=model)
    return StateQuery(
        request,
        opt.shapes,
        opt.shared_shapes,
        equal=opt.anchored,
        fragments=opt.fragments,
        names=opt.parameters.names,
        is_swarms=True,
    )


def _others(membership: Membership) -> dict[str, Member]:
    return {
        peer: member
        for peer, member in membership.directory.members().items()
        if peer != membership.identity.peer_id
    }


def usual_round(
    members: Iterable[Member], met: Mapping[str, str], partners: Collection[str] = ()
) -> int:
    """Return the median of the members' rounds: of those among ``partners``, or else one of each
    address range at which some were ``met``, or else of all; 0 if there are none.
    """
    rounds = [(member.peer, member.round) for member in members]
    of_partners = [round for peer, round in rounds if peer in partners]
    return median_low(of_partners or of_ranges(rounds, met) or [0])


def in_order(
    members: Sequence[Member], met: Mapping[str, str], creator: str, partners: Collection[str] = ()
) -> list[Member]:
    """Sort members by whom to ask first: ``partners``, and of the others the latest by their
    rounds, the creator, those that were ``met``, and one of each address range in turn. All from
    the usual round on count alike, so that lies gain nothing.
    """
    said = ((member.peer, member.addresses) for member in members)
    turn = {peer: place for place, peer in enumerate(known_first(said, met))}
    usual = usual_round(members, met, partners)

    def rank(member: Member) -> tuple[bool, int, bool, int]:
        return (
            member.peer not in partners,
            -min(member.round, usual),
            member.peer != creator,
            turn[member.peer],
        )

    return sorted(members, key=rank)


def _able(members: Mapping[str, Member], model: str, early: Sequence[str]) -> list[Member]:
    """Return the members that can hand out weights.

    ``early``: states in which they can before they have finished a round.

    A member that waits in a later round than 0 has resumed, and is about to train.
    """
    able = []
    for member in members.values():
        states = ("waiting", "training") if member.round > 0 else early
        if member.model == model and member.state in states:
            able.append(member)
    return able


def _early(membership: Membership, begun: bool) -> Sequence[str]:
    """Return the states in which a member serves weights before it has finished a round."""
    if begun:
        return ()
    # In a swarm of own loops a member that waits in round 0 has the first weights; others have none
    # before they train.
    if membership.manifest.task == OWN_LOOP:
        return ("waiting", "training")
    return ("training",)


def _addressed(members: Sequence[Member]) -> list[Peer]:
    return [(member.peer, member.addresses) for member in members[:MAX_ASKED]]


def _fetch_weights(
    membership: Membership,
    model: str,
    opt: OuterOptimizer,
    begun: bool,
    watch: Callable[[FetchProgress], None],
) -> State | None:
    creator = membership.manifest.creator
    early = _early(membership, begun)
    others = _others(membership)
    sources = sources_in(membership.host, others, model, creator, early)
    if not sources:
        return None
    try:
        held = None if begun else State(opt.round, opt.slow, opt.shared)
        query = query_for(membership, model, opt)
        state = fetch_state(membership.host, query, sources, held, watch)
    except NetworkError as error:
        raise _not_had(others, str(error).rstrip(".")) from error
    if state is None:
        raise _not_had(others, "none of its members served them")
    return state


def _not_had(others: Mapping[str, Member], why: str) -> NetworkError:
    """Return the error that the weights could not be had from ``others``."""
    if any(member.state == "training" or member.round > 0 for member in others.values()):
        return NetworkError(
            f"The swarm is training, but its weights could not be had ({why}): try again."
        )
    return NetworkError(
        "The swarm has not begun, and the weights that it begins with could not be had from those "
        f"who wait in it ({why}): see that its creator's loop still runs, and join again."
    )
