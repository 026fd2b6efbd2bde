"""How a loop of one's own comes into a swarm: `create` and `join` return its session."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from shoal.optim import Ranks
from shoal.optim.parameters import AveragedParameters
from shoal.optim.ranks.orders import Channel
from shoal.swarm.access.link import Link
from shoal.swarm.exchange.contribution import model_digest
from shoal.swarm.identity import Identity
from shoal.swarm.membership import membership as members
from shoal.swarm.membership.membership import Membership, NetworkOptions
from shoal.swarm.state.catch_up import check_model
from shoal.swarm.training.following_session import FollowingSession
from shoal.swarm.training.session import Session
from shoal.swarm.training.session_setup import (
    EPOCH_S,
    SessionError,
    checked_name,
    fitting,
    identity_of,
    new_swarm,
    parameters_of_all,
    whole_parameters,
)
from shoal.swarm.training.step_watch import outlive_main

READ_S = 10.0
"""For a newcomer's first reading of the directory."""


def create(
    state: nn.Module | Iterable[Tensor],
    *,
    name: str = "own-loop",
    node: str = "",
    start_when: int = 1,
    shards: int = 8,
    seed: int = 0,
    invite_only: bool = False,
    bucket: int = 0,
    epoch_s: float = EPOCH_S,
    network: NetworkOptions | None = None,
    identity: Identity | str | os.PathLike[str] | None = None,
    ranks: Ranks | None = None,
    **outer: Any,
) -> Session:
    """Create a swarm and return its first session; others join by its ``link``.

    Args:
        state: a module or parameters; those that require a gradient are averaged.
        name, node: what people call the swarm, and this node.
        start_when: peers at which training begins.
        shards: parts that the data is divided into.
        seed: of what all peers draw alike.
        invite_only: admit by invitation; needs a file as ``identity``.
        bucket: most members to average with, 4 to 64; 0: all.
        epoch_s: seconds after which buckets change, at least 30.
        network: where this node listens.
        identity: a key or its file, made if missing; None: not kept.
        ranks: this peer's processes.
        outer: fields of ``OuterSettings``; ``fragments`` may be modules.

    Raises:
        SessionError, IdentityError, AdmissionError: an argument cannot be used.
        StartupError: the node does not get onto the network; nothing is left running.
        RankFailed, RankLost: another rank raised one of these, or is gone.
    """

    def connected(params: AveragedParameters) -> Membership:
        key = identity_of(identity)
        sealed = new_swarm(
            key,
            params,
            name=name,
            seed=seed,
            start_when=start_when,
            shards=shards,
            invite_only=invite_only,
            outer=outer,
            model=state if isinstance(state, nn.Module) else None,
            bucket=bucket,
            epoch_s=epoch_s,
        )
        return members.create(key, sealed, network or NetworkOptions())

    return _session(connected, state, node, ranks, first=True)


def join(
    link: str | Link,
    state: nn.Module | Iterable[Tensor],
    *,
    node: str = "",
    network: NetworkOptions | None = None,
    identity: Identity | str | os.PathLike[str] | None = None,
    ranks: Ranks | None = None,
    **settings: Any,
) -> Session:
    """Join the swarm of ``link``, made by ``create`` or `shoal up`, and return a session.

    The arguments are those of ``create``.

    ``settings``: none, because the swarm has fixed them; SessionError names the first.

    Raises:
        LinkError, IdentityError: the link or the key cannot be used.
        SessionError, ModelDiffersError: the state does not fit the swarm.
        AdmissionError: the swarm is by invitation only, and the link has none that can be used.
        StartupError, NetworkError, MessageError: the swarm is not reached; nothing is left running.
        RankFailed, RankLost: another rank of this peer raised one of these, or is gone.
    """
    if settings:
        raise SessionError(
            f"The swarm has fixed {next(iter(settings))}, or has no such setting: leave it out, "
            "for who joins takes the settings from the swarm."
        )

    def connected(params: AveragedParameters) -> Membership:
        key = identity_of(identity)
        parsed = link if isinstance(link, Link) else Link.parse(link)
        membership = members.join(key, parsed, network or NetworkOptions())
        try:
            membership.directory.refresh(READ_S)
            membership.check_alone()
            if membership.manifest.outer.alone:
                raise SessionError(
                    "The peers of this swarm share no weights (method none): join it with `shoal "
                    "join`."
                )
            own = fitting(params, membership.manifest.model)
            check_model(membership, model_digest(own), own)
        except BaseException:
            membership.close()
            raise
        return membership

    return _session(connected, state, node, ranks, first=False)


def _session(
    connected: Callable[[AveragedParameters], Membership],
    state: nn.Module | Iterable[Tensor],
    node: str,
    ranks: Ranks | None,
    *,
    first: bool,
) -> Session:
    """Return the session of this process, after rank 0 has ``connected``."""
    outlive_main()
    model = state if isinstance(state, nn.Module) else None
    if ranks is None:
        params = whole_parameters(state)
        return _entered(connected, params, model, checked_name(node), first=first)
    params = parameters_of_all(state, ranks)
    name = ranks.alike(lambda: checked_name(node))
    channel = Channel(ranks)
    if not ranks.first:
        facts: dict[str, Any] = {}
        channel.follow(lambda name, fields: facts.update(fields))
        return FollowingSession(facts, params, model, ranks, channel)
    with channel.leading():
        return _entered(connected, params, model, name, first=first, ranks=ranks, channel=channel)


def _entered(
    connected: Callable[[AveragedParameters], Membership],
    params: AveragedParameters,
    model: nn.Module | None,
    name: str,
    *,
    first: bool,
    ranks: Ranks | None = None,
    channel: Channel | None = None,
) -> Session:
    """Return the session of the process that is in the network; other ranks are told of it."""
    membership = connected(params)
    try:
        session = Session(
            membership, params, model, name, first=first, ranks=ranks, channel=channel
        )
        if channel is not None:
            channel.send(
                "session",
                settings=session.settings.model_dump_json(),
                train=session.train.model_dump(),
                fragment_of=list(membership.manifest.fragment_of),
                shard=[session.shard.index, session.shard.of, session.shard.seed],
                swarm=membership.swarm,
            )
    except BaseException:
        membership.close()
        raise
    return session
