"""The bundles that every part of an exchange is given: the node in its swarm, and the time limits.

What an exchange may hold of a node's training (`TrainingTime`) follows from what exchanges usually hold there: the median of the
newest exchanges, one of each partner, also if it was given up: slow links are usual where all have them, and one slow peer does not
make the usual. An exchange that holds training for longer than `SEVERAL` times that, and than half a round, is given up. Before
there is a measure it has the time of its bytes over a link of half 1 Mbit/s.

What an exchange holds beyond `OFTEN` times the usual is its peer's cost, however well it ends, and each round gives `GIVES` of its
time back. Who has cost `COSTLY` of a round more than that is passed over for as many rounds as it takes to give it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median_low
from typing import TYPE_CHECKING

from shoal.swarm.identity import Identity
from shoal.swarm.pacing import slow_s
from shoal.swarm.wire.messages import Member

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host

LEAST_RATE = 1e6  # bytes a second: time for so many is given in any case, and more to what moves (`shoal.swarm.pacing`)
LARGEST_S = 6 * 3600.0  # seconds that a transfer may take however much it moves
SHARE, LONGEST_S = 0.2, 300.0  # of the time from one round to the next, and seconds at most, that a node waits for others
OVERLAPPED_S = 3600.0  # seconds at most that a node waits for others while that costs no training


@dataclass(frozen=True)
class PeerContext:
    """One node in one swarm, as its exchange sees it."""

    host: Host
    """Serves the exchange's protocols."""
    identity: Identity
    """Signs what this node sends."""
    swarm: str
    """The swarm id, which is also the run in every ``RoundKey``."""
    model: str
    """``model_digest`` of the parameters; members with another one are ignored."""
    seed: int
    """Seed of the pairing and of the order of leaders, equal at all peers."""
    members: Callable[[], Mapping[str, Member]]
    """Returns the members present now by peer id (``Directory.members``)."""
    look: Callable[[], None] = lambda: None
    """Called when an unknown peer calls (``Directory.look``)."""
    is_barred: Callable[[str], bool] = lambda peer: False
    """Tells the peers with which this node exchanges nothing (``Directory.is_barred``)."""
    known: Callable[[], Mapping[str, Member]] = dict
    """Returns peers that need not be members here any more, whom rounds that are under way still meet (``Directory.everyone``)."""

    @property
    def me(self) -> str:
        return self.identity.peer_id


@dataclass(frozen=True)
class ExchangeTimeouts:
    """The limits of one exchange, in seconds."""

    wait: float = 10.0
    """How long a round waits for a partner or a group."""
    chunk: float = 5.0
    """Silence, no byte and no heartbeat, after which a transfer or a peer is given up."""
    exchange: float = 120.0
    """How long one transfer or reduction may take, if it moves no more than a slow link carries in this time (`moving`)."""
    trial: float = 0.0
    """How much longer a partner may take to accept a contribution: it tries it on data."""

    def moving(self, nbytes: int) -> float:
        """Return how long the transfer of ``nbytes`` bytes each way may take, however little it moves."""
        return max(self.exchange, min(nbytes / LEAST_RATE, LARGEST_S))

    def longest(self, nbytes: int) -> float:
        """Return how long it may take if it keeps on moving."""
        return max(self.moving(nbytes), slow_s(nbytes))

    def probe(self, left: float) -> float:
        """Return how long a peer has to answer at all, if ``left`` seconds of a round are left: a third, because two that sleep
        must not use up a round. No constant: a round trip or two must fit, also over a satellite.
        """
        return min(self.chunk, left / 3)

    def limit(self, wait: float, nbytes: int) -> float:
        """Return how long a round may take: ``wait`` to form the pair or group, the transfer of ``nbytes`` bytes, its commit."""
        return wait + self.longest(nbytes) + 8 * self.chunk


class Patience:
    """How long the rounds of one node wait for others: as long as is set, or in long rounds a fifth of the time of a round.

    Peers drift apart by a part of a round, not by seconds: where an inner step takes ten seconds, the best of partners is later
    than a setting that suits quick rounds. The shorter of the last two rounds counts, so that one pause is no measure. A round is
    the time from one sending of a fragment to its next, whatever else is sent meanwhile.
    """

    def __init__(self) -> None:
        self._began: dict[int, float] = {}
        self._periods: dict[int, tuple[float, float]] = {}

    def begin(self, now: float, fragment: int = 0) -> float:
        """Note that a round of ``fragment`` begins; return the seconds since its last one began, infinite for the first."""
        period = now - self._began.get(fragment, float("-inf"))
        self._began[fragment] = now
        if period < float("inf"):
            self._periods[fragment] = (self._periods.get(fragment, (0.0, 0.0))[1], period)
        return period

    def period(self, fragment: int = 0) -> float:
        """Return the seconds of a round of ``fragment``; 0 while they are not known."""
        return min(self._periods.get(fragment, (0.0, 0.0)))

    def of(self, timeouts: ExchangeTimeouts, fragment: int = 0) -> float:
        """Return the seconds to wait in a round of ``fragment``."""
        return max(timeouts.wait, min(self.period(fragment) * SHARE, LONGEST_S))


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
