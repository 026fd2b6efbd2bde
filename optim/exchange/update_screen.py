"""Which contributions a node refuses before the commit of a round: ``UpdateScreen``.

    screen.problem(key, own, peer, theirs)       # why it must not count, or None

An exchange without a screen of its own accepts all finite contributions (``TRUSTING``). A node's
screens are in `shoal.swarm.exchange.robust`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from shoal.optim.exchange.base import Mean, RoundKey
from shoal.optim.exchange.weighted_mean import weighted_mean


class UpdateScreen:
    """One node's check of others' contributions; this one accepts all.

    ``problem`` may be called from several threads at once.
    """

    gathers = False
    """True if every contribution is needed separately, so that an all-reduce will not do."""

    def problem(
        self,
        key: RoundKey,
        own: Callable[[], Sequence[Tensor]],
        peer: str,
        theirs: Sequence[Tensor],
    ) -> str | None:
        """Return in a few words why the contribution of ``peer`` must not count, or None if it may.

        ``own`` returns this node's.

        Neither is changed. Both are decoded, and ``theirs`` has the shapes of ``own``.
        """
        return None

    def mean(
        self, me: str, fragment: int, contributions: Contributions, unweighted_count: int = 0
    ) -> Mean:
        """Return the mean to use for a committed exchange of ``me`` and others (`weighted_mean`);
        may be computed in place.
        """
        return weighted_mean(contributions, unweighted_count)


TRUSTING = UpdateScreen()
Contributions = Sequence[tuple[str, float, Iterable[Tensor]]]
"""(peer id, weight, float32 tensors) of each member."""
