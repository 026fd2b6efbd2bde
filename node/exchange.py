"""Which exchange a node takes: pairs, or everyone."""

from __future__ import annotations

from node.membership import Membership
from node.outer import OuterError
from optim import METHODS, method_named
from swarm.exchange import SwarmExchange
from swarm.manifest import OuterSettings


def check_exchange(outer: OuterSettings) -> None:
    """OuterError if nodes cannot yet meet as the method wants."""
    if method_named(outer.method).group == "everyone":
        able = ", ".join(name for name, method in METHODS.items() if method.group != "everyone")
        raise OuterError(f"The method {outer.method!r} averages over everyone, which swarms cannot do yet: choose one of {able}.")


def make_exchange(membership: Membership, outer: OuterSettings, *, seed: int, model: str) -> SwarmExchange:
    """The exchange of the swarm's method. OuterError if there is none yet."""
    check_exchange(outer)
    return SwarmExchange(
        membership.host,
        membership.identity,
        swarm=membership.swarm,
        model=model,
        seed=seed,
        members=membership.directory.members,
        departed=membership.directory.departed,
        look=membership.directory.look,
        wait=outer.wait_s,
        chunk_timeout=outer.chunk_timeout_s,
        exchange_timeout=outer.exchange_timeout_s,
    )
