"""The exchange and the outer optimizer that a swarm's settings ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.optim import (
    Exchange,
    OuterOptimizer,
    RoundInfo,
    RoundLength,
    by_rate,
    by_tokens,
    codec_named,
    equal,
)
from shoal.optim.outer.inner import Inner, check_inner
from shoal.optim.outer.weights import Processes
from shoal.swarm.errors import OuterError, write_remedy
from shoal.swarm.exchange.context import PeerContext
from shoal.swarm.exchange.group.exchange import GroupExchange
from shoal.swarm.exchange.pair.exchange import PairExchange
from shoal.swarm.exchange.pair.selector import no_speed
from shoal.swarm.exchange.robust import DistanceScreen
from shoal.swarm.exchange.timeouts import ExchangeTimeouts
from shoal.swarm.membership.last_step import at_their_end, still_training
from shoal.swarm.membership.membership import Membership
from shoal.swarm.settings.outer import MAX_GROUP, OuterSettings
from shoal.swarm.settings.round_length import Unit, parse_round
from shoal.swarm.wire.messages import Member

TRIAL_S = 20.0
"""That a partner may take to try a contribution on data."""

SPEEDS: dict[Unit, Callable[[Member], float]] = {
    "steps": lambda member: member.steps_per_s,
    "tokens": lambda member: member.tokens_per_s,
    "seconds": no_speed,
}
"""By which members make more rounds than others, by what their rounds are counted in."""


def make_screen(outer: OuterSettings) -> DistanceScreen:
    if outer.robust == "distance":
        return DistanceScreen(sends=outer.row.sends)
    return DistanceScreen(robust=outer.robust, suspect=0.0, sends=outer.row.sends)


def make_exchange(
    membership: Membership,
    outer: OuterSettings,
    screen: DistanceScreen,
    opt: OuterOptimizer,
    *,
    seed: int,
    model: str,
) -> PairExchange | GroupExchange:
    """Return the exchange of the swarm's method for its optimizer."""
    host = membership.host
    identity = membership.identity
    swarm = membership.swarm
    directory = membership.directory

    def members() -> dict[str, Member]:
        return still_training(directory.members())

    def departed() -> dict[str, Member]:
        return {**directory.departed(), **at_their_end(directory.members())}

    context = PeerContext(
        host,
        identity,
        swarm,
        model,
        seed,
        members,
        directory.look,
        directory.is_barred,
        directory.everyone,
    )
    trial = TRIAL_S if outer.check_loss else 0.0
    timeouts = ExchangeTimeouts(outer.wait_s, trial=trial)
    fragments = opt.fragments
    overlap = opt.lag > 0  # training goes on meanwhile
    if outer.row.group == "everyone":
        return GroupExchange(
            context,
            timeouts,
            fragments=fragments,
            overlap=overlap,
            max_group=MAX_GROUP,
            follow=outer.row.follows,
            screen=screen,
        )
    return PairExchange(
        context,
        timeouts,
        fragments=fragments,
        overlap=overlap,
        departed=departed,
        screen=screen,
        speed=SPEEDS[parse_round(outer.round)[0]],
    )


WEIGHTS = {"equal": equal, "tokens": by_tokens, "rate": by_rate}


def make_outer(
    settings: OuterSettings,
    inner: Inner,
    exchange: Exchange,
    *,
    model: torch.nn.Module | None,
    slow_device: torch.device | Path,
    length: RoundLength | None = None,
    on_round: Callable[[RoundInfo], None] | None = None,
    ranks: Processes | None = None,
    fragments: Sequence[Sequence[Tensor]] = (),
) -> OuterOptimizer:
    """Return the outer optimizer of the settings; ``ranks``: of the processes that are one peer
    together.

    ``fragments``: the parameters of each, where the manifest has them.

    OuterError if they cannot be used, as some show only with the model.
    """
    method = settings.row
    options: dict[str, Any] = {"codec": codec_named(settings.codec_name)}
    if settings.weighing != method.weights:
        options["weight"] = WEIGHTS[settings.weighing]
    if fragments:
        options["fragments"] = fragments
    if ranks is not None:
        options["ranks"] = ranks
    try:
        check_inner(inner)
    except ValueError as error:
        raise OuterError(f"This inner optimizer cannot be used: {error}.") from error
    try:
        return method.make(
            inner,
            exchange,
            model=model,
            buffers=settings.buffers,
            slow_device=slow_device,
            length=length,
            on_round=on_round,
            **settings.knobs() | options,
        )
    except ValueError as error:
        raise OuterError(
            f"The outer settings cannot be used for {settings.method!r}: {error}."
        ) from error
    except OSError as error:
        raise OuterError(
            f"The outer optimizer's state cannot be kept in files in {str(slow_device)!r} "
            f"({error.strerror}): {write_remedy(error)}, or choose another folder (--offload)."
        ) from error
