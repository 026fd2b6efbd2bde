"""The outer optimizer of a swarm's settings."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median_high, median_low
from typing import Any

import torch
from torch import Tensor

from shoal.optim import (
    Exchange,
    OuterOptimizer,
    RoundInfo,
    RoundLength,
    Seconds,
    Steps,
    Tokens,
    by_rate,
    by_tokens,
    codec_named,
    equal,
    method_named,
)
from shoal.optim.outer.parameters import Inner
from shoal.optim.outer.weights import Processes
from shoal.optim.schedule.auto_length import USEFUL, agreed_seconds, bounded_speeds
from shoal.swarm.errors import OuterError
from shoal.swarm.exchange.round_evidence import QUICKER, SEVERAL
from shoal.swarm.manifest.outer import OuterSettings, parse_round
from shoal.swarm.membership.membership import MemberView
from shoal.swarm.p2p.multiaddr import of_ranges
from shoal.swarm.wire.member import Member

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
    """Return the outer optimizer of the settings; ``ranks``: of the processes that are one peer together.

    ``fragments``: the parameters of each, where the manifest has them.

    OuterError if they cannot be used, as some show only with the model.
    """
    method = method_named(settings.method)
    options: dict[str, Any] = {"codec": codec_named(settings.codec)} if settings.codec is not None else {}
    if settings.weighing != method.weights:
        options["weight"] = WEIGHTS[settings.weighing]
    if fragments:
        options["fragments"] = fragments
    if ranks is not None:
        options["ranks"] = ranks
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
        raise OuterError(f"The outer settings cannot be used for {settings.method!r}: {error}.") from error
    except OSError as error:
        raise OuterError(
            f"The outer optimizer's state cannot be kept in files in {str(slow_device)!r} ({error.strerror}): free some space, "
            "or choose another folder (--offload)."
        ) from error


WINDOW = 20  # reports over which the speed is measured


class StepRate:
    """The usual number of inner steps, or of tokens, a second: the median of the last reports.

    The first report, which includes compilation, and one in which the machine slept count little.
    """

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=WINDOW)

    def add(self, amount: int, seconds: float) -> float:
        """Add a report of ``amount`` inner steps or tokens in ``seconds``, without waiting for others, and return the speed."""
        if seconds > 0:
            self._rates.append(amount / seconds)
        return median_high(self._rates) if self._rates else 0.0


def round_length(setting: str, clock: Callable[[], float], speeds: Callable[[], Iterable[float]]) -> RoundLength:
    """Return the length of a round that ``outer.round`` asks for.

    ``clock``: Unix seconds, the same for all peers. ``speeds``: `announced_speeds`, for seconds:auto.
    """
    unit, amount = parse_round(setting)
    if unit == "steps":
        return Steps()
    if unit == "tokens":
        assert amount is not None  # parse_round checks it
        return Tokens(int(amount))
    return Seconds(amount if amount is not None else lambda: agreed_seconds(speeds()), clock)


def announced_speeds(membership: MemberView) -> list[float]:
    """Return the inner steps a second of all members, as they announce them.

    All peers compute one length of a round from them, so none is weighed; but keys are free, and most may be made up. So they move
    this node's length at most 8 times beyond what its own speed and those of members with which it has exchanged make it, once it
    has three; before that 256 times beyond what its own does.
    """
    members, partner = membership.directory.members(), membership.host.resource_manager.partner
    own = [member.steps_per_s for peer, member in members.items() if peer == membership.identity.peer_id]
    partners = [member.steps_per_s for peer, member in members.items() if partner(peer)]
    known, most = ([*partners, *own], 1 / USEFUL) if len(partners) >= SEVERAL else (own, QUICKER)
    return bounded_speeds([member.steps_per_s for member in members.values()], known, most)


def steps_of_rounds(settings: OuterSettings, rounds: int, members: Iterable[Member], met: Mapping[str, str]) -> int | None:
    """Return the inner steps of a node in so many ``rounds``; None if that depends on speeds, and no member says its own.

    Rounds of tokens and of seconds are measured by the lower median of what ``members`` say, with one vote for each address range
    at which they were ``met``, so that neither a liar nor many keys of one move it far.
    """
    unit, amount = parse_round(settings.round)
    if unit == "steps":
        return rounds * (settings.resolved().every or 1)
    known = [member for member in members if member.steps_per_s > 0]
    if unit == "tokens":
        per_step = of_ranges(((one.peer, one.tokens_per_s / one.steps_per_s) for one in known if one.tokens_per_s > 0), met)
        return int(rounds * (amount or 0) / median_low(per_step)) if per_step else None
    speeds = of_ranges(((one.peer, one.steps_per_s) for one in known), met)
    return int(rounds * (amount or agreed_seconds(speeds)) * median_low(speeds)) if speeds else None
