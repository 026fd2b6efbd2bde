"""How long exchanges may hold up training: ``TrainingTime``.

An exchange is given up when it has held training for longer than 4 times the median of the last 16
partners, half a round, and a second. What it held beyond 3 medians is charged to its partner. A
partner that owes more than 15 % of a round is passed over until the debt, which shrinks by 3 % of
each round, is paid. Why: docs/internals.md, "A slow partner".
"""

from __future__ import annotations

import math
from statistics import median_low

from shoal.swarm.exchange.round_time import FIRST_RATE, FIRST_S, LEAST_S, RoundTime
from shoal.swarm.exchange.timeouts import ExchangeTimeouts
from shoal.swarm.p2p.newest import Newest

SEVERAL, LONGER = 4, 1.5  # times what exchanges usually hold, and what they take in all: given up
OFTEN, FREE_S = 3, 0.5  # times the usual, and seconds at least: of no cost
GIVES, COSTLY, COSTLY_S = 0.03, 0.15, 1.0  # parts of a round; seconds at least
# seconds that training waits for partners which come late, before they are more than a part of its
# time
SPARE_S = 4.0
PARTNERS, PEERS = 16, 1024  # remembered


class TrainingTime(RoundTime):
    """The time of the rounds of a node that averages in pairs, and how much training time its
    exchanges hold. ``fragments``: sent in turn.
    """

    def __init__(self, timeouts: ExchangeTimeouts, fragments: int) -> None:
        super().__init__(timeouts, fragments)
        self.holds = Newest[str, float](PARTNERS)
        """Peer -> seconds for which the newest exchange with it held training."""
        self.took = Newest[str, float](PARTNERS)
        """Peer -> seconds of the newest exchange with it in all."""
        self._nbytes = Newest[str, int](PARTNERS)
        """Peer -> bytes each way of that, of this node's own contribution: nobody's word."""
        self._waits = Newest[str, float](PARTNERS)
        """Peer -> seconds that training waited for it to come to the newest round with it."""
        self._spare, self._spared = SPARE_S, 0.0
        self._owed = Newest[str, tuple[float, int]](PEERS)
        """Peer -> seconds that it had cost more than it gave, and the round of that."""

    def budget(self, nbytes: int, fragment: int, before: float = 0.0) -> float:
        """Return the seconds for which an exchange of ``nbytes`` bytes each way may hold training
        that has gone on ``before``.
        """
        half = min(self._round_s(fragment) / 2, self.patience(fragment))
        if self.holds:
            # At the end training waits for all of an exchange, which else goes on meanwhile.
            times = max(nbytes / median_low(self._nbytes.values()), 1.0) if self._nbytes else 1.0
            whole = LONGER * times * median_low(self.took.values()) - before if self.took else 0.0
            return max(
                LEAST_S, SEVERAL * times * median_low(self.holds.values()), half, whole
            )  # with a contribution's trials
        return max(FIRST_S, nbytes / FIRST_RATE, half) + self.timeouts.trial

    def awaiting(self, now: float, fragment: int) -> float:
        """Return the seconds for which training may wait, from ``now`` on, for a partner to come to
        a round of ``fragment``.
        """
        self._spare = min(self._spare + GIVES * max(now - self._spared, 0.0), SPARE_S)
        self._spared = now
        return max(
            self.budget(0, fragment),
            SEVERAL * median_low(self._waits.values() or (0.0,)),
            self._spare,
        )

    def waited(self, peer: str, seconds: float) -> float:
        """Note that training waited ``seconds`` for ``peer`` to come; return those beyond `OFTEN`
        times the usual and the spare.
        """
        others = [waited for other, waited in self._waits.items() if other != peer]
        free = max(OFTEN * median_low(others or (0.0,)), self._spare)
        self._waits[peer], self._spare = seconds, max(self._spare - seconds, 0.0)
        return max(seconds - free, 0.0)

    def spent(
        self,
        peer: str,
        round: int,
        fragment: int,
        held: float,
        *,
        whole: bool,
        took: float = 0.0,
        nbytes: int = 0,
    ) -> dict[str, int]:
        """Note that an exchange of ``nbytes`` each way with ``peer`` held training for ``held`` of
        its seconds. ``whole``: it was not given up. Return who is passed over for how many rounds:
        it, or the first, now measured.
        """
        before = dict(self.holds)
        self.holds[peer] = held
        if nbytes:
            self._nbytes[peer] = nbytes
        usual = (
            max(OFTEN * median_low(before.values()), FREE_S) if before else math.inf
        )  # over a satellite the first ones are dear
        others = [seconds for other, seconds in self.took.items() if other != peer]
        often = median_low(others) if others else 0.0
        free = max(usual, often)
        if whole:
            self.took[peer] = max(took, held)
        costs = {peer: max(held - free, 0.0) if whole or not before else held}
        # training went on for rounds in which this fragment was not sent, so that nobody else was
        # met with it
        if others:
            costs[peer] += (
                max(took - held - max(self.period(fragment), often), 0.0) / self._fragments
            )
        if len(before) == 1 and peer not in before:
            ((first, seconds),) = before.items()
            # If it was given up, that is charged already.
            owed = self._owes(first, round, fragment)
            costs[first] = max(seconds - max(OFTEN * held, FREE_S) - owed, 0.0)
        return {
            one: rounds
            for one, cost in costs.items()
            if (rounds := self.cost(one, round, fragment, cost))
        }

    def cost(self, peer: str, round: int, fragment: int, seconds: float) -> int:
        """Note that ``peer`` cost training ``seconds``, or did not come in these; return for how
        many rounds it is passed over.
        """
        period = max(self._round_s(fragment), LEAST_S)
        owed = self._owes(peer, round, fragment) + seconds
        self._owed[peer] = owed, round
        return (
            math.ceil(owed / (GIVES * period))
            if seconds and owed > max(COSTLY_S, COSTLY * period)
            else 0
        )

    def _owes(self, peer: str, round: int, fragment: int) -> float:
        """Return the seconds that ``peer`` owes in ``round``."""
        owed, since = self._owed.get(peer, (0.0, round))
        given = max(round - since, 0) * GIVES * max(self._round_s(fragment), LEAST_S)
        return max(owed - given, 0.0)
