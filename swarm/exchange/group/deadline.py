"""When a group's round goes on without those who are missing: ``GroupDeadline``.

    deadline.forming(fragment)             # seconds that the first two wait for other members
    deadline.reducing(nbytes, fragment)    # seconds that a group has to send its contributions

A group has 4 times what members usually took: the median of the newest 16 groups, of the median
of each. Over a line that is full all take long, so none of them misses the deadline:
docs/internals.md, "The deadline of a group".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from statistics import median_low

from shoal.swarm.exchange.round_time import FIRST_RATE, FIRST_S, LEAST_S, OVERLAPPED_S, RoundTime
from shoal.swarm.exchange.timeouts import ExchangeTimeouts

PART = 0.25  # of a round that a node waits for the others of a group in any case
FORMING_S = 3.0  # seconds at least that a group's first two members wait for the others
MEDIANS = 4  # after so many a group goes on without those who have still to send
GROUPS = 16  # that are measured, the newest


class GroupDeadline(RoundTime):
    """The deadlines of one node's groups. ``fragments``: sent in turn; ``overlap``: training goes
    on without the mean for a while, a round at most.
    """

    def __init__(
        self, timeouts: ExchangeTimeouts, fragments: int, *, overlap: bool = False
    ) -> None:
        super().__init__(timeouts, fragments)
        self.overlap = overlap
        self._took = deque[tuple[float, int]](maxlen=GROUPS)
        """Of each group the seconds after which all was here that one of its members sent, in the
        median, and the bytes each way of this node's own contribution: nobody's word.
        """

    def waits_until_needed(self, fragment: int) -> bool:
        """Return whether groups of ``fragment`` wait for the late until training needs the mean: it
        goes on meanwhile, and its rounds are longer than the usual wait.
        """
        earlier_s, newest_s = self._periods.get(fragment, (0.0, 0.0))
        return self.overlap and min(earlier_s or newest_s, newest_s) > FORMING_S

    def collecting(self, fragment: int) -> float:
        """Return the seconds for which a contribution may wait for its group. Where groups wait
        until training needs the mean, `patience` may begin later.
        """
        longer = OVERLAPPED_S if self.waits_until_needed(fragment) else 0.0
        return self.patience(fragment) + longer

    def forming(self, fragment: int) -> float:
        """Return the seconds for which the first members of a group wait for the others, once
        training waits.
        """
        return max(PART * self._round_s(fragment), FORMING_S)

    def least(self, fragment: int) -> float:
        """Return the seconds for which training waits for a group in any case."""
        return max(PART * self._round_s(fragment), LEAST_S)

    def reducing(self, nbytes: int, fragment: int) -> float:
        """Return the seconds that a group has, once it is formed, to move ``nbytes`` bytes each
        way.
        """
        if not self._took:
            first = max(FIRST_S, nbytes / FIRST_RATE, self.least(fragment))
            return first + self.timeouts.trial
        seconds = median_low(took for took, _ in self._took)
        usual = median_low(moved for _, moved in self._took)
        return max(MEDIANS * seconds * max(nbytes / usual, 1.0), self.least(fragment))

    def measure(self, took: Collection[float], nbytes: int) -> None:
        """Note the seconds that each member ``took`` in a group that moved ``nbytes`` each way."""
        if took:
            self._took.append((median_low(took), nbytes))
