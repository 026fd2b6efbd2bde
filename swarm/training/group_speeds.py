"""How fast the members of a group compute: in rounds of steps all wait for the slowest.

    speeds = group_speeds(directory.members(), info.members, me)
    speeds is not None and speeds.uneven        # True: the slowest costs more than the group brings

Announced speeds leave out the time spent waiting for others, so they differ where machines do,
though all make the same number of steps. Why so: docs/internals.md, "A slow member of a group".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from statistics import fmean
from typing import NamedTuple

from shoal.swarm.exchange.cost import UNEVEN_SHARE
from shoal.swarm.wire.messages import Member


class GroupSpeeds(NamedTuple):
    """Inner steps a second, as the members of a group announce them."""

    own: float
    mean: float
    slowest: float
    slowest_name: str

    @property
    def uneven(self) -> bool:
        """Whether the slowest is much slower than the mean, and than this node."""
        return self.slowest < UNEVEN_SHARE * min(self.mean, self.own)


def group_speeds(
    members: Mapping[str, Member], group: Collection[str], me: str
) -> GroupSpeeds | None:
    """Return the speeds of the peers of ``group``, of which this node is ``me``; None while one of
    them has announced none.
    """
    known = {peer: members[peer].steps_per_s for peer in group if peer in members}
    if me not in known or len(known) < len(group) or min(known.values()) <= 0:
        return None
    slowest = min(known, key=lambda peer: known[peer])
    return GroupSpeeds(known[me], fmean(known.values()), known[slowest], members[slowest].name)
