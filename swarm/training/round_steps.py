"""How long a round is, and how many inner steps so many rounds are, by the speeds of members."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from statistics import median_low

from shoal.optim import RoundLength, Seconds, Steps, Tokens
from shoal.optim.schedule.agreed_seconds import USEFUL, agreed_seconds, bounded_speeds
from shoal.swarm.exchange.round_evidence import FEW, QUICKER
from shoal.swarm.membership.membership import Membership
from shoal.swarm.p2p.addresses import of_ranges
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.settings.round_length import parse_round
from shoal.swarm.wire.messages import Member


def round_length(
    setting: str, clock: Callable[[], float], speeds: Callable[[], Iterable[float]]
) -> RoundLength:
    """Return the length of a round that ``outer.round`` asks for.

    ``clock``: Unix seconds, the same for all peers. ``speeds``: `announced_speeds`, for
    seconds:auto.
    """
    unit, amount = parse_round(setting)
    if unit == "steps":
        return Steps()
    if unit == "tokens":
        assert amount is not None  # parse_round checks it
        return Tokens(int(amount))
    return Seconds(amount if amount is not None else lambda: agreed_seconds(speeds()), clock)


def announced_speeds(membership: Membership) -> list[float]:
    """Return the inner steps a second of all members, as they announce them.

    All peers compute one length of a round from them, so none is weighed; but keys are free, and
    most may be made up. So they move this node's length at most 8 times beyond what its own speed
    and those of members with which it has exchanged make it, once it has three; before that 256
    times beyond what its own does.
    """
    members = membership.directory.members()
    partner = membership.host.resource_manager.partner
    me = members.get(membership.identity.peer_id)
    known = [] if me is None else [me.steps_per_s]
    most: float = QUICKER
    partners = [member.steps_per_s for peer, member in members.items() if partner(peer)]
    if len(partners) >= FEW:
        known += partners
        most = 1 / USEFUL
    return bounded_speeds([member.steps_per_s for member in members.values()], known, most)


def steps_of_rounds(
    settings: OuterSettings, rounds: int, members: Iterable[Member], met: Mapping[str, str]
) -> int | None:
    """Return the inner steps of a node in so many ``rounds``; None if that depends on speeds, and
    no member says its own.

    Rounds of tokens and of seconds are measured by the lower median of what ``members`` say, with
    one vote for each address range at which they were ``met``, so that neither a liar nor many keys
    of one move it far.
    """
    unit, amount = parse_round(settings.round)
    if unit == "steps":
        return rounds * (settings.resolved().every or 1)
    known = [member for member in members if member.steps_per_s > 0]
    if unit == "tokens":
        said = []
        for one in known:
            if one.tokens_per_s > 0:
                said.append((one.peer, one.tokens_per_s / one.steps_per_s))
        tokens_a_step = of_ranges(said, met)
        if not tokens_a_step:
            return None
        return int(rounds * (amount or 0) / median_low(tokens_a_step))
    speeds = of_ranges(((one.peer, one.steps_per_s) for one in known), met)
    if not speeds:
        return None
    return int(rounds * (amount or agreed_seconds(speeds)) * median_low(speeds))
