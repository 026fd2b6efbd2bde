"""What an exchange may hold of a node's training, by what exchanges usually hold there, and who has cost more of it than it gave.

The usual is the median of the newest exchanges, one of each partner, also if it was given up: slow links are usual where all have
them, and one slow peer does not make the usual. An exchange that holds training for longer than `SEVERAL` times that, and than half
a round, is given up. Before there is a measure it has the time of its bytes over a link of half 1 Mbit/s.

What an exchange holds beyond `OFTEN` times the usual is its peer's cost, however well it ends, and each round gives `GIVES` of its
time back. Who has cost `COSTLY` of a round more than that is passed over for as many rounds as it takes to give it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from statistics import median_low

from shoal.swarm.exchange.context import ExchangeTimeouts, Patience

SEVERAL, LONGER = 4, 1.5  # times what exchanges usually hold, and what they take in all: given up
OFTEN, FREE_S = 3, 0.5  # times the usual, and seconds at least: of no cost
LEAST_S = 1.0  # seconds that every exchange may hold training, and of the shortest round that counts
FIRST_S, FIRST_RATE = 2.0, 62.5e3  # seconds, and bytes a second each way, of an exchange before there is a measure
GIVES, COSTLY, COSTLY_S = 0.03, 0.15, 1.0  # parts of a round; seconds at least
LATE, LATE_S = 0.25, 3.0  # of a round, and seconds at least, that a group's first two members wait for the others
PARTNERS, PEERS = 16, 1024  # remembered


class TrainingTime:
    """The training time of one node that its exchanges hold. ``fragments``: sent in turn."""

    def __init__(self, timeouts: ExchangeTimeouts, patience: Patience, fragments: int) -> None:
        self._timeouts, self._patience, self._fragments = timeouts, patience, fragments
        self.holds: OrderedDict[str, float] = OrderedDict()
        """Peer -> seconds for which the newest exchange with it held training."""
        self.took: OrderedDict[str, float] = OrderedDict()
        """Peer -> seconds of the newest exchange with it in all."""
        self._owed: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """Peer -> seconds that it had cost more than it gave, and the round of that."""

    def budget(self, nbytes: int, fragment: int, before: float = 0.0) -> float:
        """Return the seconds for which an exchange of ``nbytes`` bytes each way may hold training that has gone on ``before``."""
        half = min(self._round_s(fragment) / 2, self._patience.of(self._timeouts, fragment))
        if self.holds and fragment < self._fragments:
            # At the end training waits for all of an exchange, which else goes on meanwhile.
            whole = LONGER * median_low(self.took.values()) - before if self.took else 0.0
            return max(LEAST_S, SEVERAL * median_low(self.holds.values()), half, whole)  # trials of a contribution are in them
        # The last average is of all weights, and so larger than what was measured.
        return max(FIRST_S, nbytes / FIRST_RATE, half) + self._timeouts.trial

    def forming(self, fragment: int) -> float:
        """Return the seconds for which the first members of a group wait for the others."""
        return max(LATE * self._round_s(fragment), LATE_S)

    def spent(self, peer: str, round: int, fragment: int, held: float, *, whole: bool, took: float = 0.0) -> dict[str, int]:
        """Note that an exchange with ``peer`` held training for ``held`` of the seconds that it ``took``; ``whole``: it was not
        given up. Return the peers to be passed over, and for how many rounds: it, or the first one, now that there is a measure.
        """
        before = dict(self.holds)
        self.holds[peer] = held
        self.holds.move_to_end(peer)
        usual = max(OFTEN * median_low(before.values()), FREE_S) if before else math.inf  # over a satellite the first ones are dear
        others = [seconds for other, seconds in self.took.items() if other != peer]
        often = median_low(others) if others else 0.0
        free = max(usual, often)
        if whole:
            self.took[peer] = max(took, held)
            self.took.move_to_end(peer)
        costs = {peer: max(held - free, 0.0) if whole or not before else held}
        if others:  # training went on for rounds in which this fragment was not sent, so that nobody else was met with it
            costs[peer] += max(took - held - max(self._patience.period(fragment), often), 0.0) / self._fragments
        if len(before) == 1 and peer not in before:
            costs |= {first: max(seconds - max(OFTEN * held, FREE_S), 0.0) for first, seconds in before.items()}
        for table in (self.holds, self.took):
            while len(table) > PARTNERS:
                table.popitem(last=False)
        return {one: rounds for one, cost in costs.items() if (rounds := self.cost(one, round, fragment, cost))}

    def cost(self, peer: str, round: int, fragment: int, seconds: float) -> int:
        """Note that ``peer`` cost training ``seconds``, or did not come in these; return for how many rounds it is passed over."""
        period = max(self._round_s(fragment), LEAST_S)
        owed, since = self._owed.pop(peer, (0.0, round))
        owed = max(owed - max(round - since, 0) * GIVES * period, 0.0) + seconds
        self._owed[peer] = owed, round
        while len(self._owed) > PEERS:
            self._owed.popitem(last=False)
        return math.ceil(owed / (GIVES * period)) if seconds and owed > max(COSTLY_S, COSTLY * period) else 0

    def _round_s(self, fragment: int) -> float:
        """Return the seconds of a round; 0 while they are not known."""
        return self._patience.period(fragment) / self._fragments
