"""What a node makes of others' contributions: which it refuses before anything counts, and what it takes in place of the mean.

An exchange asks its ``Defence`` at two moments. Before the commit, ``problem``: whoever has one refuses that contribution, so a
pair goes apart and a group goes on without it, and nothing of it was ever used. After the commit, ``mean``. The defence of a node
is in swarm/defence.py; without one an exchange trusts everybody with finite numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from torch import Tensor

from shoal.optim.exchange.base import Mean, RoundKey, weighted_mean

Contributions = Sequence[tuple[str, float, Iterable[Tensor]]]
"""(peer id, weight, float32 tensors) of each member."""


class Defence(Protocol):
    """One node's. ``problem`` may be called from several threads at once."""

    @property
    def gathers(self) -> bool:
        """Needs every contribution by itself, so that sums of parts (an all-reduce) are of no use."""
        ...

    def problem(self, key: RoundKey, own: Callable[[], Sequence[Tensor]], peer: str, theirs: Sequence[Tensor]) -> str | None:
        """Why the contribution of ``peer`` must not count, in a few words; None: it may. ``own`` gives this node's.

        Neither is changed. Both are as the codec delivered them, and ``theirs`` has the shapes of ``own``.
        """
        ...

    def mean(self, me: str, fragment: int, contributions: Contributions) -> Mean:
        """What to take for the mean of a committed exchange, the own contribution ``me`` among them; may be computed in place."""
        ...


class Trusting:
    """Everybody counts as it says."""

    gathers = False

    def problem(self, key: RoundKey, own: Callable[[], Sequence[Tensor]], peer: str, theirs: Sequence[Tensor]) -> str | None:
        """None."""
        return None

    def mean(self, me: str, fragment: int, contributions: Contributions) -> Mean:
        """The weighted mean."""
        return weighted_mean(contributions)


TRUSTING = Trusting()
