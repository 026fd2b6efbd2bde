"""Which members still train, and which have done their last step."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.swarm.wire.messages import Member


def still_training(members: Mapping[str, Member]) -> dict[str, Member]:
    """Return those of ``members`` whose last step is not done: rounds of training, changes and
    weights to go on from are among them.
    """
    return {peer: member for peer, member in members.items() if not member.finished}


def at_their_end(members: Mapping[str, Member]) -> dict[str, Member]:
    """Return those of ``members`` whose last step is done: the last average is among them."""
    return {peer: member for peer, member in members.items() if member.finished}
