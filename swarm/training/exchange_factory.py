"""The exchange that the settings of a manifest ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.optim import method_named
from shoal.swarm.exchange.context import ExchangeTimeouts, PeerContext
from shoal.swarm.exchange.pair.exchange import PairExchange
from shoal.swarm.exchange.robust import DistanceScreen
from shoal.swarm.manifest.outer import OuterSettings
from shoal.swarm.membership.membership import MemberView

if TYPE_CHECKING:
    from shoal.swarm.exchange.group.exchange import GroupExchange

GRACE_S = 2.0  # that a group waits for the others once it has its quorum
TRIAL_S = 20.0  # that a partner may take to try a contribution on data


def make_screen(outer: OuterSettings) -> DistanceScreen:
    method = method_named(outer.method)
    return DistanceScreen(robust=outer.robust, suspect=outer.suspect, sends=method.sends)


def make_exchange(
    membership: MemberView,
    outer: OuterSettings,
    screen: DistanceScreen,
    *,
    seed: int,
    model: str,
    fragments: int = 1,
    overlap: bool = False,
) -> PairExchange | GroupExchange:
    """Return the exchange of the swarm's method.

    ``fragments``: how many its optimizer sends in turn. ``overlap``: that optimizer trains on meanwhile.
    """
    host, identity, swarm, directory = membership.host, membership.identity, membership.swarm, membership.directory
    context = PeerContext(
        host, identity, swarm, model, seed, directory.members, directory.look, directory.is_barred, directory.everyone
    )  # fmt: skip
    trial = TRIAL_S if outer.check_loss else 0.0
    timeouts = ExchangeTimeouts(outer.wait_s, trial=trial)
    if method_named(outer.method).group == "everyone":
        from shoal.swarm.exchange.group.exchange import GroupExchange  # with hivemind's all-reduce, and scipy

        return GroupExchange(
            context,
            timeouts,
            fragments=fragments,
            quorum=outer.quorum,
            grace=GRACE_S,
            max_group=outer.max_group,
            # A mask belongs to its round: in another one the others would send other values.
            follow=outer.method != "sparta",
            screen=screen,
        )
    return PairExchange(context, timeouts, fragments=fragments, overlap=overlap, departed=directory.departed, screen=screen)
