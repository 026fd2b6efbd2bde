"""What went wrong in a node and does not end it: each is written once it is new."""

from __future__ import annotations

from collections.abc import Callable

from shoal.node.metrics.log import Metrics
from shoal.node.training import resources
from shoal.swarm.membership.membership import Membership


class FaultNews:
    """Counts of refused messages and internal errors, and memory beyond its bound.

    ``memory_bound_gb``: of this process; 0: none. ``say`` gets the sentence that it was passed.
    """

    def __init__(
        self, metrics: Metrics, say: Callable[[str], None], memory_bound_gb: float
    ) -> None:
        self._metrics = metrics
        self._say = say
        # Until it is passed.
        self._memory_bound_gb = memory_bound_gb
        self._refused: dict[str, int] = {}
        self._internal_errors: dict[str, int] = {}

    def check_memory(self) -> None:
        """Say it once if this process has had more memory than the bound."""
        said = resources.beyond(self._memory_bound_gb)
        if said:
            self._say(said)
            self._memory_bound_gb = 0.0

    def write(self, membership: Membership) -> None:
        """Write the counts to the metrics if they have changed."""
        refused = membership.refused()
        if refused != self._refused:
            self._refused = refused
            self._metrics.write("refused", **refused)
        internal_errors = membership.host.internal_errors.counts()
        if internal_errors != self._internal_errors:
            self._internal_errors = internal_errors
            self._metrics.write("internal_errors", **internal_errors)
